"""Start and stop vLLM's offline engine."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_overlay.errors import OverlayError

if TYPE_CHECKING:
    from vllm import LLM

STOP_SECONDS = 30.0
"""How long the engine's processes may take to end after they were told to, before they are killed."""


def build_engine(model: str, options: Sequence[str]) -> LLM:
    """Load `model` in vLLM. `options` are command-line words as `vllm serve` takes them, such as `["--dtype",
    "float32"]`.

    We set no defaults of our own: what the user does not say is vLLM's choice. Raises OverlayError for a word that this
    vLLM does not know; what vLLM raises while loading reaches the caller as it is.
    """
    arguments = parse_options(options)
    from vllm import LLM

    return LLM(model=model, **arguments)


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Command-line words as keyword arguments of `vllm.LLM`: only those that differ from the parser's defaults.

    Raises OverlayError, in one line, when vLLM is not installed or its parser refuses a word.
    """
    try:
        # The parser's own module moved in 0.11.1; this one imports it in every release.
        from vllm.engine.arg_utils import EngineArgs, FlexibleArgumentParser
    except ModuleNotFoundError as error:
        raise OverlayError(
            f"vLLM is needed here and does not import ({error}); install the release you serve with"
        ) from error

    class OneLineParser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise OverlayError(f"after `--`, vLLM's own options: {' '.join(message.split())}")

    parser = OneLineParser(add_help=False, allow_abbrev=False)
    EngineArgs.add_cli_args(parser)
    # LLM has a default of its own for some options: one that the user did not touch must not be passed.
    untouched = vars(parser.parse_args([]))
    parsed = vars(parser.parse_args(list(options)))
    given = {name: value for name, value in parsed.items() if value != untouched[name]}
    if "model" in given:
        raise OverlayError("after `--`, vLLM's own options: the model is named by our own --model, before the `--`")
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(given.keys() - known):
        raise OverlayError(f"after `--`, vLLM's own options: vLLM's offline engine takes no {', '.join(unknown)}")
    return given


def shut_down(llm: LLM) -> None:
    """End the engine. When it returns, every process that the engine had started is gone."""
    import psutil  # vLLM requires it

    engine_core = llm.llm_engine.engine_core
    # Only a client of an engine in another process has `resources`; an engine in this process ends its own workers.
    manager = getattr(getattr(engine_core, "resources", None), "engine_manager", None)
    processes = []
    for process in manager.processes if manager is not None else ():
        if psutil.pid_exists(process.pid):
            engine = psutil.Process(process.pid)
            processes += [engine, *engine.children(recursive=True)]
    # Without a timeout vLLM kills the engine after 5 s, worker processes or not; older releases offer no other choice.
    patient = "timeout" in inspect.signature(engine_core.shutdown).parameters
    engine_core.shutdown(**({"timeout": STOP_SECONDS} if patient else {}))
    _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
            process.kill()
    psutil.wait_procs(alive)
