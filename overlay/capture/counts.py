"""What each worker has captured, in numbers: kept in small files of the run's shared folder, and told to Prometheus.

vLLM's `/metrics` is answered by the API server's process, or by one of several, and the counts are the workers'. A
worker's writer thread writes them down about twice a second where they changed; whoever is asked reads them then. So a
step pays nothing, every API server gives the same answer, and a worker that is busy or gone keeps nobody waiting.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from vllm_overlay.shared_folder import find_folder

if TYPE_CHECKING:
    from prometheus_client import Metric

COUNTERS: Mapping[str, str] = {
    "rows": "Rows of hidden states, one a token, that were written to the store.",
    "bytes": "Bytes of hidden states that were written to the store.",
    "records": "Requests whose record is in the store, incomplete ones among them.",
    "incomplete_records": "Records in the store of which some rows were never captured.",
    "waits": "Steps that waited because the host memory for rows was full.",
}
GAUGES: Mapping[str, str] = {
    "live_requests": "Requests that the worker has begun and that have not ended.",
    "backlog": "Messages about steps and requests that the writer has not taken up yet.",
}
COUNTS = (*COUNTERS, *GAUGES)

METRIC_PREFIX = "vllm_overlay_capture_"
# A writer's counts are in a file that is named after its log in the store.
LABEL = "log"
_FOLDER = "counts"

_LOGGER = logging.getLogger("vllm_overlay.capture")


class CountsFile:
    """One worker's counts, rewritten whole where they changed. Nothing is written where no folder is shared."""

    def __init__(self, log: int) -> None:
        folder = find_folder()
        self._path = folder / _FOLDER / f"{log}.json" if folder else None
        self._written: Mapping[str, int] = {}

    def write(self, counts: Mapping[str, int]) -> None:
        """Write the counts. A folder that cannot be written to is logged, once: capture goes on without it."""
        if self._path is None or counts == self._written:
            return
        draft = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps(counts), encoding="utf-8")
            draft.rename(self._path)
        except OSError as error:
            _LOGGER.error("/metrics will not show what is captured from now on: %s", error)
            self._path = None
        self._written = dict(counts)


def read_counts() -> dict[str, dict[str, int]]:
    """The counts of this run's workers, by log."""
    folder = find_folder()
    counts = {}
    for file in sorted((folder / _FOLDER).glob("*.json")) if folder else []:
        # When a run ends its folder goes, file by file.
        with suppress(FileNotFoundError):
            counts[file.stem] = json.loads(file.read_text(encoding="utf-8"))
    return counts


class CountsCollector:
    """What `prometheus_client` asks at a scrape."""

    def collect(self) -> Iterator[Metric]:
        """A family for each count, with a sample for each log; no samples while no worker has captured."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = read_counts()
        for names, family_class in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, text in names.items():
                family = family_class(METRIC_PREFIX + name, text, labels=[LABEL])
                for log, values in counts.items():
                    family.add_metric([log], values[name])
                yield family
