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
        seconds, seconds_after = next(self._times)
        steps = (seconds / 4, seconds / 2, seconds)
        return self._benchmark.Round(workload.counted_tokens, seconds, seconds_after, steps)


def test_pairs_are_compared_side_by_side_and_the_first_one_warms_up(benchmark: ModuleType) -> None:
    turns: list[Any] = []
    sides = {
        "off": PlayedSide(benchmark, "off", [(9, 0), (1, 0), (2, 0), (4, 0)], turns),
        "on": PlayedSide(benchmark, "on", [(1, 0), (1, 0.25), (2, 0), (4, 4)], turns),
    }
    report = benchmark._compare_workload("decode", benchmark.Workload.parse("4x16+32"), sides, 3, 2)
    assert report["on_over_off_of_each_pair"] == [0.8, 1.0, 0.5]
    assert report["on_over_off"] == 0.8
    assert report["milliseconds_after_the_last_token_on"] == [250.0, 0.0, 4000.0]
    assert (report["tokens_per_second_off"], report["tokens_per_second_on"]) == (64.0, 64.0)
    assert [name for name, _ in turns] == ["on", "off", "off", "on", "on", "off", "off", "on"]
    seeds = [seed for _, seed in turns]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 4


def test_a_disk_takes_part_in_the_first_pairs_only(benchmark: ModuleType) -> None:
    turns: list[Any] = []
    times = {"off": [1] * 4, "on": [1] * 4, "disk": [9, 2, 4]}
    sides = {
        name: PlayedSide(benchmark, name, [(seconds, 0) for seconds in played], turns) for name, played in times.items()
    }
    report = benchmark._compare_workload("decode", benchmark.Workload.parse("4x16+32"), sides, 3, 2)
    assert [name for name, _ in turns].count("disk") == 3
    assert report["disk_over_off_of_each_pair"] == [0.5, 0.25]
    assert report["on_over_off_of_each_pair"] == [1.0, 1.0, 1.0]


def test_a_round_is_split_into_parts_that_add_up_to_it(benchmark: ModuleType) -> None:
    parts = benchmark.Round(96, 10.0, 0.5, (2.0, 3.0, 4.0, 7.0, 9.0)).split()
    assert parts == {
        "to_the_first_output": 2000.0,
        "a_step": 1500.0,
        "steps_beyond_their_median": 1000.0,
        "from_the_last_output_to_the_answer": 1000.0,
        "after_the_last_token": 500.0,
    }
    assert sum(parts.values()) + 3 * parts["a_step"] == 10_500.0


def test_each_step_of_the_engine_is_noted_and_the_engine_is_as_before(benchmark: ModuleType) -> None:
    class Engine:
        def step(self) -> str:
            return "outputs"

    engine = Engine()
    with benchmark.noting_steps(engine) as ends:
        assert [engine.step(), engine.step()] == ["outputs", "outputs"]
    assert ends == sorted(ends) and len(ends) == 2
    engine.step()
    assert len(ends) == 2


@pytest.mark.parametrize(("text", "counted"), [("64x256", 64 * 256), ("32x64+128", 32 * 128)])
def test_prompt_tokens_are_counted_where_one_is_generated(benchmark: ModuleType, text: str, counted: int) -> None:
    assert benchmark.Workload.parse(text).counted_tokens == counted


def test_each_of_several_replicas_has_a_gpu_and_a_single_one_what_there_is(benchmark: ModuleType) -> None:
    assert benchmark.list_replicas(1) == [{}]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in benchmark.list_replicas(2)] == ["0", "1"]
