"""What tools/benchmark.py makes of the rounds that its engines run."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.contract.conftest import REPOSITORY


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("benchmark")


class PlayedSide:
    """Runs rounds of given lengths, and notes whose turn it is."""

    def __init__(self, benchmark: ModuleType, name: str, times: list[tuple[float, float]], turns: list[Any]) -> None:
        self._benchmark, self._name, self._times, self._turns = benchmark, name, iter(times), turns

    def run_round(self, workload: Any, seed: int) -> Any:
        self._turns.append((self._name, seed))
        return self._benchmark.Round(workload.counted_tokens, *next(self._times))


def test_pairs_are_compared_side_by_side_and_the_first_one_warms_up(benchmark: ModuleType) -> None:
    turns: list[Any] = []
    sides = {
        "off": PlayedSide(benchmark, "off", [(9, 0), (1, 0), (2, 0), (4, 0)], turns),
        "on": PlayedSide(benchmark, "on", [(1, 0), (1, 0.25), (2, 0), (4, 4)], turns),
    }
    report = benchmark._compare_workload("decode", benchmark.Workload.parse("4x16+32"), sides, 3)
    assert report["on_over_off_of_each_pair"] == [0.8, 1.0, 0.5]
    assert report["on_over_off"] == 0.8
    assert report["milliseconds_after_the_last_token_on"] == [250.0, 0.0, 4000.0]
    assert (report["tokens_per_second_off"], report["tokens_per_second_on"]) == (64.0, 64.0)
    assert [name for name, _ in turns] == ["on", "off", "off", "on", "on", "off", "off", "on"]
    seeds = [seed for _, seed in turns]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 4


@pytest.mark.parametrize(("text", "counted"), [("64x256", 64 * 256), ("32x64+128", 32 * 128)])
def test_prompt_tokens_are_counted_where_one_is_generated(benchmark: ModuleType, text: str, counted: int) -> None:
    assert benchmark.Workload.parse(text).counted_tokens == counted


def test_each_of_several_replicas_has_a_gpu_and_a_single_one_what_there_is(benchmark: ModuleType) -> None:
    assert benchmark.list_replicas(1) == [{}]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in benchmark.list_replicas(2)] == ["0", "1"]
