"""Records in several parts: each pipeline stage of an engine writes the layers that it computes into its own log.

A part waits in the table `parts` until the last of its record arrives, from whichever stage; in that same transaction
the record comes into being. Its first part is then in `records`, the others stay in `parts` and name it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_overlay.store.errors import StoreError

logger = logging.getLogger("vllm_overlay.store")

# The facts of a record that its parts have too, in the order of RECORD_COLUMNS' values.
RECORD_COLUMNS = (
    "log, request_id, first_position, num_tokens, num_prompt_tokens, complete, finish_reason, tag, checksum, created, "
    "extents, loss_mask, token_ids"
)

PARTS_SCHEMA = (
    """CREATE TABLE parts (
        session TEXT NOT NULL, number INTEGER NOT NULL, part INTEGER NOT NULL, record INTEGER REFERENCES records,
        log INTEGER NOT NULL REFERENCES logs, request_id TEXT NOT NULL, first_position INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL, num_prompt_tokens INTEGER NOT NULL, complete INTEGER NOT NULL,
        finish_reason TEXT NOT NULL, tag TEXT, checksum BLOB NOT NULL, created REAL NOT NULL, extents BLOB NOT NULL,
        loss_mask BLOB, token_ids BLOB)""",
    "CREATE UNIQUE INDEX parts_waiting ON parts (session, number, part) WHERE record IS NULL",
    "CREATE INDEX parts_by_record ON parts (record)",
    "CREATE INDEX parts_by_log ON parts (log)",
)

Execute = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Part:
    """What one stage of an engine writes: `columns` of the store's layers, as part `index` of `count` of each record.

    `session` is the same in all stages of the engine and another in every other engine that writes to the store.
    """

    session: str
    index: int
    count: int
    columns: tuple[int, ...]


def insert_part(execute: Execute, part: Part, number: int, values: Sequence[object]) -> None:
    """Inside a transaction: add this part of the session's record `number`, and the record itself with its last part.

    `values` are those of RECORD_COLUMNS. Raises StoreError if another part has other tokens.
    """
    places = ", ".join("?" * (3 + len(values)))
    execute(
        f"INSERT INTO parts (session, number, part, {RECORD_COLUMNS}) VALUES ({places})",
        (part.session, number, part.index, *values),
    )
    mine = "session = ? AND number = ? AND record IS NULL"
    key = (part.session, number)
    parts, complete = execute(f"SELECT count(*), min(complete) FROM parts WHERE {mine}", key)[0]
    if parts < part.count:
        return
    _refuse_other_tokens(execute(f"SELECT DISTINCT request_id, token_ids FROM parts WHERE {mine}", key), part)
    execute(f"INSERT INTO records ({RECORD_COLUMNS}) SELECT {RECORD_COLUMNS} FROM parts WHERE {mine} AND part = 0", key)
    record = int(execute("SELECT max(id) FROM records", ())[0][0])
    execute("UPDATE records SET complete = ? WHERE id = ?", (complete, record))
    execute(f"DELETE FROM parts WHERE {mine} AND part = 0", key)
    execute(f"UPDATE parts SET record = ?, token_ids = NULL, loss_mask = NULL WHERE {mine}", (record, *key))


def _refuse_other_tokens(found: Sequence[tuple[str, bytes]], part: Part) -> None:
    if len(found) > 1:
        lengths = ", ".join(str(len(token_ids) // 8) for _, token_ids in found)
        raise StoreError(
            f"record {found[0][0]!r}: the {part.count} pipeline stages of session {part.session} saw different tokens "
            f"({lengths} of them): rows would be crossed"
        )


def drop_widowed_parts(execute: Execute, dead: Sequence[int]) -> None:
    """Inside a transaction: remove parts of engines that are gone, whose other parts never came, and say how many.

    `dead`: logs that are not closed, and whose writers are gone all the same.
    """
    living = f"closed IS NULL AND logs.id NOT IN ({', '.join(map(str, dead))})"
    widowed = f"record IS NULL AND NOT EXISTS (SELECT 1 FROM logs WHERE logs.session = parts.session AND {living})"
    requests = execute(f"SELECT DISTINCT session, number FROM parts WHERE {widowed}", ())
    if requests:
        logger.warning("%d requests were dropped: not every pipeline stage had written them", len(requests))
        execute(f"DELETE FROM parts WHERE {widowed}", ())
