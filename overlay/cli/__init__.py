"""The command line: `vllm-overlay COMMAND`.

What lives here: one module a command, each with `HELP`, `add_arguments(parser)` and `run(args) -> exit status`. What
may not: the work itself, which the commands call. Modules import nothing heavy until they run, so `--help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType

from vllm_overlay.errors import OverlayError
from vllm_overlay.progress import closing_bars

COMMANDS = ("status", "check", "prepare", "capture", "inspect", "convert", "copy", "train", "export", "evaluate")
WITH_ENGINE_OPTIONS = ("status", "prepare", "capture", "evaluate")

# They write beside their output, or rehearse in a temporary folder, and remove that if they are ended. Not those that
# run an engine themselves, for which vLLM has handlers of its own, nor `train`: torchrun ends its ranks by SIGTERM, and
# no handler of Python's runs in one that waits for another.
CLEANING_UP_AT_SIGTERM = ("check", "inspect", "convert", "copy", "export")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status: 0 only on success, 1 for an error of ours, 2 for a wrong command line.

    Raises SystemExit with status 143 if SIGTERM ends a command that has to clean up.
    """
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
    cleaning_up = _exit_at_sigterm() if args.command in CLEANING_UP_AT_SIGTERM else nullcontext()
    try:
        with cleaning_up, closing_bars():  # what is said of an error begins on a line of its own
            return int(args.run(args))
    except OverlayError as error:
        print(f"vllm-overlay: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm-overlay: interrupted", file=sys.stderr)
        return 130


@contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Make SIGTERM, which ends a process at once, an exception within the block, with the status that a shell gives."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _split_at_dashes(words: list[str]) -> tuple[list[str], list[str]]:
    """Our words and, after a lone `--`, vLLM's."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
