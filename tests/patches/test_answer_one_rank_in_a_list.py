"""One rank's answer comes in a list, all ranks' as they are, and vLLM's own executor is not touched."""

from __future__ import annotations

from typing import Any

from tests.patches.conftest import Apply
from tests.patches.old_consumer import import_old_consumer
from vllm_overlay.patches.answer_one_rank_in_a_list import PATCH, ListOfOne


class Executor:
    is_failed = False

    def collective_rpc(self, method: str, unique_reply_rank: int | None = None, args: tuple[Any, ...] = ()) -> Any:
        answers = [f"{method} by {rank}" for rank in range(2)]
        return answers if unique_reply_rank is None else answers[unique_reply_rank]

    def execute_model(self, step: str) -> Any:
        return self.collective_rpc(f"execute {step}", unique_reply_rank=0)


def test_the_answer_of_one_rank_is_a_list_of_one() -> None:
    ours = ListOfOne(Executor())
    assert ours.collective_rpc("states", unique_reply_rank=1) == ["states by 1"]
    assert ours.collective_rpc("reset", args=()) == ["reset by 0", "reset by 1"]
    assert ours.collective_rpc("reset", unique_reply_rank=None) == ["reset by 0", "reset by 1"]


def test_the_executors_own_calls_get_the_answer_itself() -> None:
    ours = ListOfOne(Executor())
    assert ours.execute_model("s") == "execute s by 0"
    assert ours.is_failed is False


def test_the_generator_gets_it(apply: Apply) -> None:
    generator = import_old_consumer("vllm_hidden_states_generator")
    from vllm.v1.executor import multiproc_executor

    apply(PATCH)
    assert generator.MultiprocExecutor.__wrapped__ is multiproc_executor.MultiprocExecutor
    assert "ListOfOne" not in str(vars(multiproc_executor.MultiprocExecutor)["collective_rpc"])
