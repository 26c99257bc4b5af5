"""Which of several replicas this process is, and its share of a dataset.

There is no scheduler here: the launcher (torchrun, srun, a shell loop) starts N processes, and each works out its own
share from the dataset alone. What is in a store already is taken off afterwards, so that replicas need not start at the
same time, agree on anything or see each other.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from vllm_overlay.dataset import DatasetItem
from vllm_overlay.errors import OverlayError

TORCHRUN = ("RANK", "WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS")

# torchrun's variables are read by torch.distributed too: with TORCHELASTIC_USE_AGENT_STORE the process group of an
# engine of its own, which vLLM makes in every worker, looks for torchrun's store and waits until it times out.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)
LAUNCHER_PREFIX = "TORCHELASTIC_"


@dataclass(frozen=True)
class Replica:
    """Replica `index` (from 0) of `count`; `source` says who said so."""

    index: int
    count: int
    source: str

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


ALONE = Replica(0, 1, "nothing says otherwise")


def find_replica(word: str | None, environ: Mapping[str, str]) -> Replica:
    """From `--replica I/N` if it was given, else torchrun's RANK and WORLD_SIZE, else srun's SLURM_PROCID and
    SLURM_NTASKS; ALONE when none of them says that there are several.

    Errors: OverlayError when a value is no replica, a pair is half there, or the two contradict each other.
    """
    if word is not None:
        index, slash, count = word.partition("/")
        if not slash:
            raise OverlayError(f"--replica {word}: write it as I/N, the first of two being 0/2")
        return _read(index, count, f"--replica {word}")
    torchrun, slurm = _find_pair(environ, TORCHRUN), _find_pair(environ, SLURM)
    # A batch script has its job's number of tasks, and rank 0, without being one of them.
    in_batch_script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    if torchrun is not None and ("TORCHELASTIC_RUN_ID" in environ or slurm is None or in_batch_script):
        return torchrun
    if slurm is None:
        return ALONE
    if in_batch_script:
        raise OverlayError(
            f"SLURM_NTASKS={slurm.count}, but this is the job's own script and none of its tasks (no SLURM_STEP_ID is "
            "set): start the replicas with srun, or say --replica 0/1 for one that takes everything"
        )
    if torchrun is not None and (torchrun.index, torchrun.count) != (slurm.index, slurm.count):
        raise OverlayError(
            f"{torchrun.source} say replica {torchrun}, {slurm.source} say replica {slurm}: "
            "unset one pair, or say which with --replica I/N"
        )
    return slurm


def _find_pair(environ: Mapping[str, str], names: tuple[str, str]) -> Replica | None:
    """What the two variables say; None when they say nothing of others: a lone process has them by accident, such as
    rank 0 alone in a batch script of SLURM, or a size of 1."""
    index, count = (environ.get(name) for name in names)
    if (index in (None, "0") and count in (None, "1")) or (index is None and count is None):
        return None
    if index is None or count is None:
        there, missing = names if count is None else (names[1], names[0])
        raise OverlayError(
            f"{there}={environ[there]} is set and {missing} is not: start the replicas with torchrun or srun, "
            "or say --replica I/N (0/1 for one that takes everything)"
        )
    return _read(index, count, " and ".join(f"{name}={environ[name]}" for name in names))


def _read(index: str, count: str, source: str) -> Replica:
    try:
        replica = Replica(int(index), int(count), source)
    except ValueError:
        raise OverlayError(f"{source}: both are whole numbers, the first of two replicas being 0/2") from None
    if not 0 <= replica.index < replica.count:
        raise OverlayError(
            f"{source}: of {replica.count} replicas there is no number {replica.index}: "
            "they count from 0 to one less than their number"
        )
    return replica


def forget_launcher(environ: MutableMapping[str, str]) -> None:
    """Take the launcher's variables out of the environment, before an engine that is not part of its group starts."""
    for name in [name for name in environ if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIX)]:
        del environ[name]


@dataclass(frozen=True)
class Plan:
    """How a dataset is shared among so many replicas. `digest` changes with the number, the keys and the lengths."""

    owners: Sequence[int]
    digest: str

    def take(self, items: Sequence[DatasetItem], index: int) -> list[DatasetItem]:
        """The share of replica `index`, in the dataset's order."""
        return [item for item, owner in zip(items, self.owners, strict=True) if owner == index]


def share_out(items: Sequence[DatasetItem], count: int) -> Plan:
    """Which of `count` replicas computes each item: the same answer in every process, about the same number of tokens.

    The items are put into an order that depends on their keys and `count` alone, and cut where a replica's tokens are
    full. A dataset that was half done by another number of replicas is thus shared evenly too.
    """
    order = sorted(range(len(items)), key=lambda at: xxhash.xxh64_intdigest(f"{count} {items[at].key}".encode()))
    lengths = np.array([len(items[at].token_ids) for at in order], dtype=np.int64)
    begins = np.cumsum(lengths) - lengths
    owners = np.empty(len(items), dtype=np.int64)
    owners[order] = begins * count // max(1, int(lengths.sum()))
    digest = xxhash.xxh64(str(count).encode())
    for item in items:
        digest.update(f" {len(item.token_ids)} {item.key}".encode())
    return Plan(owners.tolist(), digest.hexdigest()[:8])
