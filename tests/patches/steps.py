"""Workers and schedulers that are asked for steps, for the tests of one and two phases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Step:
    """A scheduler's output."""

    total_num_scheduled_tokens = 3
    grammar_bitmask: Any = None
    structured_output_request_ids: dict[str, int] = {}  # noqa: RUF012


class Config:
    """As much of a VllmConfig as is asked for."""

    def __init__(self, runner_type: str = "generate") -> None:
        self.model_config = SimpleNamespace(runner_type=runner_type)


class Scheduler:
    """A scheduler of an old program; its grammar says which step it is for."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def get_grammar_bitmask(self, step: Step) -> tuple[str, Step]:
        return "grammar", step


class TwoPhaseWorker:
    """Notes its calls; a step is unfinished until it is sampled, unless it has no tokens."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.output: Any = "output"
        self.failure: Exception | None = None

    def answer(self, method: str, argument: Any) -> Any:
        self.calls.append((method, argument))
        if method == "execute_model":
            if self.failure:
                raise self.failure
            return None if argument.total_num_scheduled_tokens else "nothing to do"
        return self.output

    def execute_model(self, step: Step) -> Any:
        return self.answer("execute_model", step)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self.answer("sample_tokens", grammar_output)
