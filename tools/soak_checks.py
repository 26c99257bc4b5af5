"""What must be true of the store, the metrics and the memory after a soak. Every check gives a line for each fault."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from soak_load import Outcome

from vllm_overlay.capture.counts import COUNTERS, METRIC_PREFIX
from vllm_overlay.store import Record, Store
from vllm_overlay.store.summary import summarize

TOLERANCE = 1e-4
MIB = 2**20


@dataclass(frozen=True)
class Recorded:
    """The outcomes and their records, by the request's number."""

    outcomes: Mapping[int, Outcome]
    records: Mapping[int, Sequence[Record]]

    def count(self) -> dict[str, int]:
        """Requests by how they ended, and records by what they are."""
        ends = Counter(outcome.end for outcome in self.outcomes.values())
        records = [(self.outcomes[number].end, record) for number, each in self.records.items() for record in each]
        return {
            "requests": len(self.outcomes),
            "finished": ends["finished"],
            "hung up": ends["hung up"],
            "cut off": ends["cut off"],
            "records": len(records),
            "records of finished requests": sum(end == "finished" for end, _ in records),
            "records of others": sum(end != "finished" for end, _ in records),
            "incomplete records": sum(not record.complete for _, record in records),
            "tokens in records": sum(len(record.token_ids) for _, record in records),
        }


def sort_records(store: Store, outcomes: Sequence[Outcome]) -> Recorded:
    """Each request's records: their tag is the request's number."""
    records: dict[int, list[Record]] = {outcome.request.number: [] for outcome in outcomes}
    for record in store:
        if record.tag is not None and record.tag.isdigit():
            records[int(record.tag)].append(record)
    return Recorded({outcome.request.number: outcome for outcome in outcomes}, records)


def find_wrong_records(recorded: Recorded) -> Iterator[str]:
    """Requests that have too few or too many records, or one with other tokens than the client sent and saw."""
    for number, outcome in recorded.outcomes.items():
        records = recorded.records[number]
        fewest = 1 if outcome.end == "finished" else 0
        if not fewest <= len(records) <= 1:
            yield f"request {number} ({outcome.end}): expected {fewest} to 1 records, found {len(records)}"
        for record in records:
            fault = _find_wrong_tokens(outcome, record)
            if fault:
                yield f"request {number} ({outcome.end}): {fault}"


def _find_wrong_tokens(outcome: Outcome, record: Record) -> str | None:
    prompt, tokens = outcome.request.prompt, record.token_ids.tolist()
    seen = [*prompt, *outcome.token_ids]
    if outcome.end == "finished" and tokens != seen[:-1]:
        # The last token was sampled and never an input.
        return f"expected the {len(seen) - 1} tokens sent and seen, found {len(tokens)}: {tokens[-5:]}"
    if tokens[: len(seen)] != seen[: len(tokens)]:
        return f"its {len(tokens)} tokens are not those that the client sent and saw"
    if len(tokens) > len(prompt) + outcome.request.max_tokens - 1:
        return f"{len(tokens)} tokens, more than were asked for"
    if record.num_prompt_tokens != min(len(prompt), len(tokens)):
        return f"expected {len(prompt)} prompt tokens, found {record.num_prompt_tokens}"
    return None


@dataclass(frozen=True)
class Comparison:
    """Records of a sample compared with the reference. `worst` is the largest difference of a value."""

    records: int
    tokens: int
    worst: float


def compare_sample(
    recorded: Recorded, count: int, seed: int, states: Callable[[torch.Tensor], torch.Tensor]
) -> Comparison:
    """Compare so many records, or all complete ones if they are fewer; `states` gives `[tokens, layers, hidden]`."""
    complete = [record for records in recorded.records.values() for record in records if record.complete]
    sample = random.Random(seed).sample(complete, min(count, len(complete)))
    worst = [float((record.hidden_states - states(record.token_ids)).abs().max()) for record in sample]
    return Comparison(len(sample), sum(len(record.token_ids) for record in sample), max(worst, default=0.0))


def find_wrong_states(comparison: Comparison, wanted: int) -> Iterator[str]:
    if comparison.records < wanted:
        yield f"expected {wanted} complete records to compare, found {comparison.records}"
    if not comparison.worst < TOLERANCE:
        yield f"states are {comparison.worst:.3g} from the reference's, expected less than {TOLERANCE}"


def find_cut_off(recorded: Recorded) -> Iterator[str]:
    """Requests that the server let down."""
    for number, outcome in recorded.outcomes.items():
        if outcome.end == "cut off":
            yield f"request {number}: {outcome.error}"


def find_wrong_counts(scraped: Mapping[str, float], store: Store) -> Iterator[str]:
    """Counters of the last scrape that do not say what is in the store."""
    summary = summarize(store)
    expected = {
        "rows": summary.rows_stored,
        "bytes": summary.rows_stored * store.meta.row_bytes,
        "records": summary.records,
        "incomplete_records": summary.incomplete,
    }
    for name, value in expected.items():
        found = scraped.get(f"{METRIC_PREFIX}{name}_total")
        if found != value:
            yield f"/metrics: expected {METRIC_PREFIX}{name}_total of {value}, found {found}"


def read_counters(scraped: Mapping[str, float]) -> dict[str, int]:
    """Of a scrape, what the overlay counts."""
    found = {name: scraped.get(f"{METRIC_PREFIX}{name}_total") for name in COUNTERS}
    return {name: int(value) for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Growth:
    """The resident memory of one process, in MiB: means of the halves of the run, and growth over the last half."""

    process: str
    first_half: float
    last_half: float
    grown: float


def measure_growth(samples: Mapping[str, Sequence[int]]) -> list[Growth]:
    """From samples in bytes, evenly spaced. Growth over the last half is twice that from its first half to its last."""
    return [_measure_growth(process, each) for process, each in samples.items() if len(each) >= 4]


def _measure_growth(process: str, samples: Sequence[int]) -> Growth:
    mean: Any = statistics.fmean
    half, quarter = len(samples) // 2, len(samples) // 4
    grown = 2 * (mean(samples[-quarter:]) - mean(samples[-2 * quarter : -quarter]))
    return Growth(process, *(round(each / MIB, 1) for each in (mean(samples[:half]), mean(samples[half:]), grown)))


def find_grown(growths: Sequence[Growth], plain: Sequence[Growth], most: float) -> Iterator[str]:
    """Processes that grew by more than `most` MiB above what the same process of a plain vLLM grew by, if it did."""
    expected = {growth.process: max(0.0, growth.grown) for growth in plain}
    for growth in growths:
        own = expected.get(growth.process, 0.0)
        if growth.grown > own + most:
            yield (
                f"{growth.process}: grew by {growth.grown:.1f} MiB in the last half, expected at most {most} above the "
                f"{own:.1f} of plain vLLM"
            )
