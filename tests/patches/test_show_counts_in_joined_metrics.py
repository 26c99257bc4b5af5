"""What several API servers wrote, joined as the route of vLLM's `/metrics` does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.capture.counts import COUNTS, CountsFile
from vllm_overlay.patches.show_counts_in_joined_metrics import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE


def scrape() -> str:
    """The application that vLLM's servers answer with, as far as metrics go."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from prometheus_fastapi_instrumentator import Instrumentator
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    app = FastAPI()
    Instrumentator(registry=get_prometheus_registry()).instrument(app).expose(app)
    return str(TestClient(app).get("/metrics").text)


def test_each_of_several_servers_shows_the_workers_counts(
    apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import Counter
    from prometheus_client.values import MultiProcessValue

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    (tmp_path / "shared").mkdir()
    CountsFile(1).write(dict.fromkeys(COUNTS, 17))
    # What another server has written.
    monkeypatch.setattr("prometheus_client.values.ValueClass", MultiProcessValue(lambda: 4711))
    Counter("others", "Of another server.", registry=None).inc(3)
    apply(PATCH)
    lines = scrape().splitlines()
    assert "others_total 3.0" in lines
    assert lines.count('vllm_overlay_capture_records_total{log="1"} 17.0') == 1
    assert lines.count('vllm_overlay_capture_live_requests{log="1"} 17.0') == 1
