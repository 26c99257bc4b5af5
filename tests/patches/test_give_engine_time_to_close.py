"""Engine processes are waited for, whatever `vllm serve` says."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_overlay.patches.give_engine_time_to_close import GRACE_S, PATCH, build


class Manager:
    @build
    def shutdown(self, timeout: float | None = None) -> float | None:
        return timeout


@pytest.mark.parametrize(
    ("words", "expected"),
    [({}, GRACE_S), ({"timeout": 0}, GRACE_S), ({"timeout": None}, GRACE_S), ({"timeout": 90.0}, 90.0)],
)
def test_at_least_the_grace(words: dict[str, Any], expected: float) -> None:
    assert Manager().shutdown(**words) == expected


def test_a_positional_time_is_the_same() -> None:
    assert Manager().shutdown(0) == GRACE_S


def test_it_is_needed_where_the_time_can_be_given(request: pytest.FixtureRequest) -> None:
    import vllm

    from vllm_overlay.compat.releases import is_needed, resolve_release

    release = resolve_release(vllm.__version__, policy="strict", stands_for=None)
    if not is_needed(PATCH.vllm, release):
        from vllm.v1.engine.utils import CoreEngineProcManager

        assert "shutdown" not in vars(CoreEngineProcManager)
        return
    applied = request.getfixturevalue("apply")(PATCH)
    assert applied.replacements
