"""The stores of several replicas in one folder, read as one.

    STORE/replica-<name>/     a store of its own, written by one replica of a capture on several machines
    STORE/index.sqlite ...    beside them, if an engine has written to STORE itself too

Why not one index for all: it must be on a filesystem of one machine, and a folder that machines share is none. A
replica's store is written by one machine at a time, and read by others when it is closed.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.files import StoreFiles
from vllm_overlay.store.index import INDEX_FILE, Index, lacks_tables
from vllm_overlay.store.reader import Damage, Record, Store
from vllm_overlay.store.remote import RemoteFiles, RemotePath, StorePath

logger = logging.getLogger("vllm_overlay.store")

REPLICA_PREFIX = "replica-"


def find_members(folder: StorePath) -> Sequence[StorePath]:
    """As `find_stores`, of a remote folder too."""
    return RemoteFiles(folder).find_stores(REPLICA_PREFIX) if isinstance(folder, RemotePath) else find_stores(folder)


def find_stores(folder: Path) -> list[Path]:
    """The stores in a folder: itself if it is one, then its replicas', by name; an empty list if there is no folder.

    Raises StoreError as `is_store`.
    """
    with naming_path("read", folder):
        found = [folder, *sorted(folder.glob(f"{REPLICA_PREFIX}*"))]
    return [path for path in found if is_store(path)]


def is_store(folder: Path) -> bool:
    """Whether there is a store in just this folder.

    One whose writer has not come to its tables, or died before, is passed over with a warning: it has no records, and
    its next writer goes on with it. Raises StoreError if an index is no database.
    """
    with naming_path("read", folder):
        begun = (folder / INDEX_FILE).is_file()
    if begun and lacks_tables(folder):
        _warn_of_no_tables(folder)
        return False
    return begun


@functools.cache
def _warn_of_no_tables(path: Path) -> None:
    """Once for each: a store is looked for several times in one run."""
    logger.warning("%s holds no records: its %s has no tables yet; passed over", path, INDEX_FILE)


class JoinedStore(Store):
    """Several stores read as one: the records of one after those of the other, as many as there were at the opening.

    What is committed afterwards does not show up: a number stays the same record while replicas write.
    """

    def __init__(self, folder: StorePath, members: Sequence[Store]) -> None:
        self._folder = folder
        self._members = tuple(members)
        self.meta = members[0].meta
        for member in members[1:]:
            if misfits := self.meta.misfits(member.meta):
                raise StoreError(f"{member.path} holds other rows than {members[0].path}: {'; '.join(misfits)}")
        self._ends = list(accumulate(map(len, members)))

    @classmethod
    def join(cls, folder: StorePath) -> JoinedStore:
        """Raises StoreError if there is no store in `folder`, or one holds rows of another kind than the others."""
        paths = find_members(folder)
        if not paths:
            raise StoreError(f"{folder} is not a store: it has no {INDEX_FILE}, nor has a {REPLICA_PREFIX}* in it")
        members = [Store(path) for path in paths]
        try:
            return cls(folder, members)
        except BaseException:
            for member in members:
                member.close()
            raise

    @property
    def members(self) -> tuple[Store, ...]:
        return self._members

    @property
    def files(self) -> StoreFiles[StorePath]:
        """Raises StoreError: each of the members has its own."""
        raise StoreError(f"{self._folder} has files for each of its {len(self._members)} stores")

    @property
    def index(self) -> Index:
        """Raises StoreError: there is one for each of the members."""
        raise StoreError(f"{self._folder} has an index for each of its {len(self._members)} stores")

    def __len__(self) -> int:
        return self._ends[-1]

    def __contains__(self, request_id: object) -> bool:
        return any(request_id in member for member in self._members)

    def __getitem__(self, key: int | str) -> Record:
        """Raises IndexError or KeyError if there is no such record."""
        if isinstance(key, str):
            return self._find_newest(key)
        member, number = self._place(key)
        return member[number]

    def read_states(self, numbers: Sequence[int], places: Sequence[slice], out: torch.Tensor) -> None:
        by_member: dict[Store, list[tuple[int, slice]]] = {}
        for number, place in zip(numbers, places, strict=True):
            member, own = self._place(number)
            by_member.setdefault(member, []).append((own, place))
        for member, found in by_member.items():
            member.read_states([own for own, _ in found], [place for _, place in found], out)

    def tags(self) -> set[str]:
        return set().union(*(member.tags() for member in self._members))

    def complete_numbers(self) -> list[int]:
        numbers = []
        for member, end, length in zip(self._members, self._ends, self._lengths(), strict=True):
            numbers += [end - length + number for number in member.complete_numbers() if number < length]
        return numbers

    def check(self, number: int) -> Damage | None:
        """As a single store's; the damage names its own store's record."""
        member, own = self._place(number)
        damage = member.check(own)
        if damage is None:
            return None
        rows = tuple(f"{member.path.name}/{each}" for each in damage.rows)
        return Damage(number, damage.request_id, rows, damage.problem)

    def close(self) -> None:
        for member in self._members:
            member.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedStore.join, (self._folder,)

    def _lengths(self) -> list[int]:
        return [end - begin for begin, end in zip([0, *self._ends], self._ends, strict=False)]

    def _place(self, number: int) -> tuple[Store, int]:
        """The store that record `number` is in, and its number there."""
        length = len(self)
        if not -length <= number < length:
            raise IndexError(f"record {number} of {self._folder}, which has {length}")
        number %= length
        at = bisect_right(self._ends, number)
        return self._members[at], number - (self._ends[at - 1] if at else 0)

    def _find_newest(self, request_id: str) -> Record:
        """Engines count their requests alike: several members may have a record of this id."""
        having = [member for member in self._members if request_id in member]
        if not having:
            raise KeyError(f"{self._folder} has no record of request {request_id!r}")
        return max(having, key=lambda member: _committed(member, request_id))[request_id]


def _committed(store: Store, request_id: str) -> float:
    """When the newest record of the request was committed, in seconds since 1970 by its writer's clock."""
    return float(store.index.execute("SELECT max(created) FROM records WHERE request_id = ?", (request_id,))[0][0])
