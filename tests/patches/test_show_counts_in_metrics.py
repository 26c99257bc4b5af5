"""The registry that vLLM answers `/metrics` from, with a worker's counts beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.capture.counts import COUNTS, CountsCollector, CountsFile
from vllm_overlay.patches.show_counts_in_metrics import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One API server, one worker that has captured, and a clean registry afterwards."""
    from prometheus_client import REGISTRY

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    CountsFile(1).write(dict.fromkeys(COUNTS, 17))
    yield
    for collector in [one for one in REGISTRY._collector_to_names if isinstance(one, CountsCollector)]:
        REGISTRY.unregister(collector)


def scrape() -> str:
    from prometheus_client import generate_latest
    from vllm.v1.metrics import prometheus

    return str(generate_latest(prometheus.get_prometheus_registry()), "utf-8")


def test_a_scrape_shows_the_workers_counts(apply: Apply) -> None:
    apply(PATCH)
    lines = scrape().splitlines()
    assert 'vllm_overlay_capture_rows_total{log="1"} 17.0' in lines
    assert 'vllm_overlay_capture_backlog{log="1"} 17.0' in lines
    assert "# TYPE vllm_overlay_capture_incomplete_records_total counter" in lines
    assert any(line.startswith("# HELP vllm_overlay_capture_waits_total ") for line in lines)


def test_an_application_that_is_built_twice_shows_them_once(apply: Apply) -> None:
    apply(PATCH)
    assert scrape().count("# TYPE vllm_overlay_capture_rows_total") == 1
    assert scrape().count("# TYPE vllm_overlay_capture_rows_total") == 1


def test_a_joined_registry_is_left_to_the_patch_of_those(
    apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    apply(PATCH)
    assert "vllm_overlay" not in scrape()


def test_the_worker_is_gone_and_the_scrape_goes_on(apply: Apply, tmp_path: Path) -> None:
    apply(PATCH)
    (tmp_path / "counts" / "1.json").unlink()
    assert "vllm_overlay_capture_rows_total{" not in scrape()
    assert "# TYPE vllm_overlay_capture_rows_total counter" in scrape()
