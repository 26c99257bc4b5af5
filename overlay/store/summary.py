"""What is in a store, in numbers: for `vllm-overlay inspect` and for a look before a training run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_overlay.store.extents import HOLE, merge_extents
from vllm_overlay.store.reader import Store


@dataclass(frozen=True)
class StoreSummary:
    """Counts over all records. Rows and tokens are counts, bytes_on_disk what the filesystem has set aside, or
    the sizes of remote files. Where pipeline stages wrote a store, a token has a row in the log of each.

    rows_stored: rows that the shards hold, those of writers at work as of their last commit. rows_in_records: of these,
    rows that a record refers to, each once. row_references: the same, once for each record, so that what is above
    rows_in_records was shared between records and not stored again.

    windows: records that begin after their request's first position.
    """

    records: int
    complete: int
    incomplete: int
    windows: int
    prompt_tokens: int
    generated_tokens: int
    rows_stored: int
    rows_in_records: int
    row_references: int
    rows_dropped: int
    logs: int
    logs_open: int
    logs_unclean: int
    shards: int
    bytes_on_disk: int
    finish_reasons: dict[str, int]


def summarize(store: Store) -> StoreSummary:
    """Read each index once. Raises StoreError if one or the folder cannot be read."""
    summaries = [_summarize_member(member) for member in store.members]
    counts = {
        each.name: sum(getattr(summary, each.name) for summary in summaries)
        for each in fields(StoreSummary)
        if each.name != "finish_reasons"
    }
    reasons: Counter[str] = Counter()
    for summary in summaries:
        reasons.update(summary.finish_reasons)
    return StoreSummary(**counts, finish_reasons=dict(reasons.most_common()))


def _summarize_member(store: Store) -> StoreSummary:
    execute = store.index.execute
    records, complete, windows, prompt, tokens = execute(
        f"SELECT count(*), coalesce(sum(complete), 0), coalesce(sum({store.index.first_position} > 0), 0), "
        "coalesce(sum(num_prompt_tokens), 0), coalesce(sum(num_tokens), 0) FROM records"
    )[0]
    logs, logs_open, unclean, dropped = execute(
        "SELECT count(*), coalesce(sum(closed IS NULL), 0), coalesce(sum(clean = 0), 0), coalesce(sum(dropped), 0) "
        "FROM logs"
    )[0]
    # Not logs.rows, which counts those that were retired; the last shard of a log has room for more than it holds.
    rows = execute(
        "SELECT coalesce(sum(max(0, min(shards.rows, logs.rows - first_row))), 0) "
        "FROM shards JOIN logs ON logs.id = log"
    )[0][0]
    reasons = execute(
        "SELECT finish_reason, count(*) FROM records GROUP BY finish_reason ORDER BY count(*) DESC, finish_reason"
    )
    in_records, references = _count_rows(store)
    return StoreSummary(
        records=records,
        complete=complete,
        incomplete=records - complete,
        windows=windows,
        prompt_tokens=prompt,
        generated_tokens=tokens - prompt,
        rows_stored=rows,
        rows_in_records=in_records,
        row_references=references,
        rows_dropped=dropped,
        logs=logs,
        logs_open=logs_open,
        logs_unclean=unclean,
        shards=execute("SELECT count(*) FROM shards")[0][0],
        bytes_on_disk=store.files.measure(),
        finish_reasons=dict(reasons),
    )


def _count_rows(store: Store) -> tuple[int, int]:
    """Rows in records, and references to them."""
    in_records, references = 0, 0
    for (log,) in store.index.execute("SELECT id FROM logs"):
        extents = store.index.read_extents(log)
        in_records += int(merge_extents(extents)[:, 1].sum())
        references += sum(int(each[each[:, 0] != HOLE, 1].sum()) for each in extents)
    return in_records, references


@dataclass(frozen=True)
class LayerNorms:
    """L2 norms of the rows of a sample of records, one value a layer, in the store's order of layers.

    zero_rows and non_finite_rows count the sampled positions at which the layer's state is all zero, or has an infinite
    or undefined number; the latter are left out of the norms.
    """

    layer_ids: tuple[int, ...]
    records: int
    tokens: int
    mean: tuple[float, ...]
    p5: tuple[float, ...]
    median: tuple[float, ...]
    p95: tuple[float, ...]
    zero_rows: tuple[int, ...]
    non_finite_rows: tuple[int, ...]


def measure_norms(store: Store, sample: int) -> LayerNorms | None:
    """Norms by layer over up to `sample` complete records, spread evenly over the store; None if there is none."""
    numbers = store.complete_numbers()
    if not numbers:
        return None
    chosen = np.unique(np.linspace(0, len(numbers) - 1, num=min(sample, len(numbers))).round().astype(int))
    norms = torch.cat([_row_norms(store[numbers[place]].hidden_states) for place in chosen]).numpy()  # [tokens, layers]
    columns = [column[np.isfinite(column)] for column in norms.T]
    return LayerNorms(
        layer_ids=store.layer_ids,
        records=len(chosen),
        tokens=len(norms),
        mean=tuple(float(column.mean()) if len(column) else float("nan") for column in columns),
        p5=_percentile(columns, 5),
        median=_percentile(columns, 50),
        p95=_percentile(columns, 95),
        zero_rows=tuple(int((column == 0).sum()) for column in columns),
        non_finite_rows=tuple(len(norms) - len(column) for column in columns),
    )


def _row_norms(states: torch.Tensor) -> torch.Tensor:
    """`[T, layers, hidden]` -> `[T, layers]` float64: in double precision no finite row has an infinite norm."""
    return torch.stack([layer.double().norm(dim=-1) for layer in states.unbind(dim=1)], dim=1)


def _percentile(columns: list[NDArray[np.float64]], percent: int) -> tuple[float, ...]:
    return tuple(float(np.percentile(column, percent)) if len(column) else float("nan") for column in columns)
