"""What this process knows of programs written for an older vLLM: the configurations and schedulers built their way.

A program that builds vLLM's parts by hand is told by how it built them: a `SchedulerConfig` or a `Scheduler` made
the way a newer release no longer takes. vLLM's own engine makes neither. Shims whose call looks the same in old and
new programs ask here which kind calls. Everything is held weakly.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

from vllm_overlay.activation import count_old_call

# By identity: vLLM's configurations compare by value and have no hash.
_CONFIGS: dict[int, weakref.ref[Any]] = {}
# Oldest first.
_SCHEDULERS: list[weakref.ref[Any]] = []
_EXECUTORS: list[weakref.ref[Any]] = []
# By executor: (what a one-phase `execute_model` returned, the bitmask that it applied).
_STEPS: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def note_config(config: Any) -> None:
    """A `SchedulerConfig` was built in an old form."""
    key = id(config)
    _CONFIGS[key] = weakref.ref(config, lambda _: _CONFIGS.pop(key, None))


def note_scheduler(scheduler: Any) -> None:
    """A `Scheduler` was built in the form of a one-phase release."""
    _SCHEDULERS.append(weakref.ref(scheduler, _SCHEDULERS.remove))


def note_executor(executor: Any) -> None:
    """An executor was built, by whomever."""
    _EXECUTORS.append(weakref.ref(executor, _EXECUTORS.remove))


def is_old_program(vllm_config: Any) -> bool:
    """Whether the program that uses this configuration was written for an older release."""
    return id(vllm_config.scheduler_config) in _CONFIGS or find_scheduler(vllm_config) is not None


def find_scheduler(vllm_config: Any) -> Any | None:
    """The newest scheduler of an old program with this very configuration."""
    return _find_newest(_SCHEDULERS, vllm_config)


def find_executor(vllm_config: Any) -> Any | None:
    """The newest executor with this very configuration."""
    return _find_newest(_EXECUTORS, vllm_config)


def _find_newest(references: list[weakref.ref[Any]], vllm_config: Any) -> Any | None:
    for reference in reversed(references):
        found = reference()
        if found is not None and found.vllm_config is vllm_config:
            return found
    return None


def finish_step(executor: Any, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any], patch_name: str) -> Any:
    """What `execute_model` returned, or if that is an unfinished step of an old program's scheduler, its output.

    A future stays one. Everybody else's step is returned as it is: its caller asks for the second phase.
    """
    scheduler = find_scheduler(executor.vllm_config)
    later = isinstance(output, Future)
    if scheduler is None or (output is not None and not later):
        return output
    from vllm.v1.outputs import AsyncModelRunnerOutput

    scheduler_output = kwargs["scheduler_output"] if "scheduler_output" in kwargs else args[0]
    is_pooling = executor.vllm_config.model_config.runner_type == "pooling"
    if later and (is_pooling or not scheduler_output.total_num_scheduled_tokens):
        return output
    count_old_call(patch_name)
    sampled = executor.sample_tokens(scheduler.get_grammar_bitmask(scheduler_output), non_block=later)
    if later:
        return _BothPhases(output, sampled)
    # A worker in this process may hand over its output before it has left the device.
    return sampled.get_output() if isinstance(sampled, AsyncModelRunnerOutput) else sampled


class _BothPhases(Future[Any]):
    """The output of the second phase, or what went wrong in the first."""

    def __init__(self, executed: Future[Any], sampled: Future[Any]) -> None:
        super().__init__()
        self._executed, self._sampled = executed, sampled

    def done(self) -> bool:
        return self._executed.done() and self._sampled.done()

    def result(self, timeout: float | None = None) -> Any:
        self._executed.result(timeout)
        return self._sampled.result(timeout)


def keep_step(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Keep what a one-phase release returned for a step, for the caller's second phase, and return it."""
    scheduler_output = kwargs["scheduler_output"] if "scheduler_output" in kwargs else args[0]
    _STEPS[executor] = output, scheduler_output.grammar_bitmask
    return output


def take_step(executor: Any, grammar_output: Any, non_block: bool) -> Any:
    """The step that was kept, as `sample_tokens` gives it: a future if `non_block`.

    Errors: RuntimeError if there is none, or if the step applied another bitmask than the caller gives.
    """
    if executor not in _STEPS:
        raise RuntimeError("sample_tokens() must be called after execute_model()")
    output, applied = _STEPS.pop(executor)
    if grammar_output is not None and grammar_output.grammar_bitmask is not applied:
        raise RuntimeError(
            "sample_tokens: this release applies the bitmask of the scheduler's output in execute_model; another one "
            "cannot be applied after it"
        )
    if isinstance(output, Future):
        return output if non_block else output.result()
    if not non_block:
        return output
    done: Future[Any] = Future()
    done.set_result(output)
    return done
