"""The command line: `vllm-overlay COMMAND`.

What lives here: one module a command, each with `HELP`, `add_arguments(parser)` and `run(args) -> exit status`. What
may not: the work itself, which the commands call. Modules import nothing heavy until they run, so `--help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_overlay.errors import OverlayError

COMMANDS = ("status", "check", "prepare", "capture", "inspect", "convert", "copy", "train", "export", "evaluate")
WITH_ENGINE_OPTIONS = ("status", "prepare", "capture", "evaluate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status: 0 only on success, 1 for an error of ours, 2 for a wrong command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, engine_options = _split_at_dashes(words)
    parser = argparse.ArgumentParser(
        prog="vllm-overlay", description="Capture hidden states from vLLM and train EAGLE-3 draft heads from them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"vllm_overlay.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run, takes_engine_options=name in WITH_ENGINE_OPTIONS)
    args = parser.parse_args(own)
    if engine_options and not args.takes_engine_options:
        parser.error(f"{args.command} takes no vLLM options after --")
    args.engine_options = engine_options
    try:
        return int(args.run(args))
    except OverlayError as error:
        print(f"vllm-overlay: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm-overlay: interrupted", file=sys.stderr)
        return 130


def _split_at_dashes(words: list[str]) -> tuple[list[str], list[str]]:
    """Our words and, after a lone `--`, vLLM's."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
