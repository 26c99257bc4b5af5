"""0.11.0's scheduler: the grammar of a step, and of requests as it asks itself."""

from __future__ import annotations

from typing import Any

from tests.patches.conftest import ApplyShim
from tests.patches.steps import Step
from vllm_overlay.patches.ask_for_grammar_by_step import PATCH, GrammarOutput


def test_both_forms(apply_shim: ApplyShim) -> None:
    old_calls = apply_shim(PATCH)
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.scheduler import Scheduler

    assert output.GrammarOutput is GrammarOutput
    scheduler = Scheduler.__new__(Scheduler)
    step: Any = Step()
    assert scheduler.get_grammar_bitmask([], {}) == ({}, None)
    assert old_calls() == 0
    assert scheduler.get_grammar_bitmask(step) is None
    step.grammar_bitmask, step.structured_output_request_ids = object(), {"a": 1, "b": 0}
    assert scheduler.get_grammar_bitmask(step) == GrammarOutput(["a", "b"], step.grammar_bitmask)
    assert old_calls() == 2
