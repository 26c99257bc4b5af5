"""Which replica a process is, and how a dataset is shared among several."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vllm_overlay.dataset import DatasetItem
from vllm_overlay.errors import OverlayError
from vllm_overlay.offline.replica import ALONE, Replica, find_replica, forget_launcher, share_out


def make_items(count: int, seed: int = 0) -> list[DatasetItem]:
    generator = random.Random(seed)
    lengths = [generator.randrange(1, 400) for _ in range(count)]
    return [
        DatasetItem(f"c{i}", np.zeros(length, dtype=np.int64), np.ones(length, dtype=np.bool_))
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_item_has_one_owner_and_all_owners_the_same_tokens(count: int) -> None:
    items = make_items(500)
    plan = share_out(items, count)
    shares = [plan.take(items, index) for index in range(count)]
    assert sorted(item.key for share in shares for item in share) == sorted(item.key for item in items)
    tokens = [sum(len(item.token_ids) for item in share) for share in shares]
    assert max(tokens) - min(tokens) <= 2 * 400
    assert share_out(items, count) == plan


def test_what_one_number_of_replicas_left_is_shared_evenly_by_another() -> None:
    items = make_items(2000)
    left = {item.key for item in share_out(items, 2).take(items, 1)}
    plan = share_out(items, 4)
    missing = [sum(item.key in left for item in plan.take(items, index)) for index in range(4)]
    assert sum(missing) == len(left)
    assert min(missing) > 0.8 * len(left) / 4


def test_more_replicas_than_items() -> None:
    items = make_items(3)
    plan = share_out(items, 8)
    assert sorted(len(plan.take(items, index)) for index in range(8))[-3:] in ([1, 1, 1], [0, 1, 2], [0, 0, 3])
    assert sum(len(plan.take(items, index)) for index in range(8)) == 3


def test_the_plans_name_changes_with_the_number_the_keys_and_the_lengths() -> None:
    items = make_items(20)
    digests = {
        share_out(items, 2).digest,
        share_out(items, 3).digest,
        share_out(items[:-1], 2).digest,
        share_out([*items[:-1], make_items(21)[-1]], 2).digest,
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("environ", "index", "count"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 2),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, 3, 4),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, 3, 4),
        # torchrun started by srun: of each node's torchrun there is one task, and the ranks are torchrun's.
        (
            {"RANK": "9", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            9,
            16,
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 1, 2),
        # torchrun in a batch script.
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, 1, 2),
        # Left over from something else, and saying nothing: one process of one.
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, 3, 4),
    ],
)
def test_launchers(environ: dict[str, str], index: int, count: int) -> None:
    replica = find_replica(None, environ)
    assert (replica.index, replica.count) == (index, count)
    assert f"={count}" in replica.source


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"},
        # A batch script without --ntasks.
        {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
    ],
)
def test_variables_that_are_there_by_accident(environ: dict[str, str]) -> None:
    assert find_replica(None, environ) == ALONE


def test_the_option_wins() -> None:
    assert find_replica("2/3", {"RANK": "0", "WORLD_SIZE": "8"}) == Replica(2, 3, "--replica 2/3")


@pytest.mark.parametrize(
    ("word", "environ", "message"),
    [
        ("2/2", {}, r"--replica 2/2: of 2 replicas there is no number 2: they count from 0"),
        ("1", {}, r"--replica 1: write it as I/N, the first of two being 0/2"),
        ("a/2", {}, r"--replica a/2: both are whole numbers"),
        ("0/0", {}, r"--replica 0/0: of 0 replicas there is no number 0"),
        ("-1/2", {}, r"there is no number -1"),
        (None, {"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 and WORLD_SIZE=2: of 2 replicas there is no number 2"),
        (None, {"RANK": "3", "WORLD_SIZE": "1"}, r"of 1 replicas there is no number 3"),
        (None, {"RANK": "1"}, r"RANK=1 is set and WORLD_SIZE is not: .* --replica I/N"),
        (None, {"WORLD_SIZE": "4"}, r"WORLD_SIZE=4 is set and RANK is not"),
        (None, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, r"SLURM_NTASKS=4 is set and SLURM_PROCID is not"),
        (
            None,
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
            r"SLURM_NTASKS=4, but this is the job's own script .* with srun",
        ),
        (
            None,
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            r"RANK=0 and WORLD_SIZE=2 say replica 0/2, SLURM_PROCID=1 and SLURM_NTASKS=2 say replica 1/2",
        ),
    ],
)
def test_what_cannot_be_is_one_line(word: str | None, environ: dict[str, str], message: str) -> None:
    with pytest.raises(OverlayError, match=message) as raised:
        find_replica(word, environ)
    assert "\n" not in str(raised.value)


def test_nothing_of_the_launcher_reaches_the_engine() -> None:
    environ = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK"), "1")
    kept = {"CUDA_VISIBLE_DEVICES": "1", "GROUP_ID": "5", "SLURM_PROCID": "0"}
    environ |= kept
    forget_launcher(environ)
    assert environ == kept
