"""`vllm serve` with two environment variables: captured, asked per request, counted, and whole after SIGTERM.

The server's KV cache is so small that it pre-empts, and SIGTERM comes in the middle of a load: tools/soak.py in small.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.runs import Reference, clean_environment
from tests.live.server import ask
from tests.tiny_models import write_tiny_llama
from vllm_overlay.store import Record, Store

pytestmark = pytest.mark.live

TOOLS = Path(__file__).resolve().parents[2] / "tools"
LAYERS = (0, 2, 4)
ENGINE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
# 16 requests of up to 208 tokens would need up to 112 blocks.
TINY_CACHE = ["--block-size", "32", "--num-gpu-blocks-override", "24"]
COUNTS = "vllm_overlay_capture_"


@dataclass(frozen=True)
class Served:
    """Five answers and a scrape after them; then a load, and a scrape right before SIGTERM in the middle of it."""

    answers: list[dict[str, Any]]
    scraped: Mapping[str, float]
    outcomes: list[Any]
    scraped_last: Mapping[str, float]
    store: Path


@pytest.fixture(scope="module")
def soak() -> Iterator[Any]:
    """The modules of tools/soak.py, by name."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(TOOLS)
        yield importlib.import_module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), layers=4, spread=0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path, soak: Any) -> Served:
    folder = tmp_path_factory.mktemp("served")
    environment = clean_environment(
        {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(folder / "store"), "VLLM_OVERLAY_LAYERS": "0,2,4"}
    )
    load = soak("soak_load")
    scrapes: list[Mapping[str, float]] = []
    with soak("soak_server").Server(model, [*ENGINE, *TINY_CACHE], environment, folder / "log") as server:
        server.wait_until_ready()
        answers = [
            ask(server.url, model, prompt="hello there", vllm_xargs={"overlay": json.dumps({"tag": "first"})}),
            ask(server.url, model, prompt="not this one", vllm_xargs={"overlay": json.dumps({"capture": False})}),
            ask(server.url, model, prompt="and this"),
            ask(server.url, model, prompt="and this", vllm_xargs=ask_for_tokens("last")),
            ask(server.url, model, prompt="and this", vllm_xargs=ask_for_tokens([-3, 12])),
        ]
        scraped = server.scrape_when(lambda now: now[f"{COUNTS}records_total"] == 4)
        ended = []

        def stop_in_the_middle(outcome: Any) -> None:
            ended.append(outcome)
            if len(ended) == 45:
                scrapes.append(server.scrape())
                server.terminate()

        # vLLM 0.16's server leaves what its dead engine had running open until the client gives up.
        outcomes = load.run_load(server.url, str(model), load.plan_requests(60, 1), 16, stop_in_the_middle, seconds=30)
        server.wait(60)
    return Served(answers, scraped, outcomes, scrapes[0], folder / "store")


def ask_for_tokens(tokens: Any) -> dict[str, str]:
    return {"overlay": json.dumps({"tokens": tokens, "tag": "window"})}


def list_asked(store: Store) -> list[Record]:
    """The records of what was asked before the load, whose tags are numbers."""
    return [record for record in store if record.tag in ("first", None, "window")]


def test_requests_are_captured_as_they_ask(served: Served, model: Path) -> None:
    reference = Reference(model)
    with Store.open(served.store) as store:
        records = list_asked(store)
        assert [record.tag for record in records] == ["first", None, "window", "window"]
        for record, text in zip(records[:2], ("hello there", "and this"), strict=True):
            assert record.complete
            assert record.num_prompt_tokens == len(text)
            assert len(record.token_ids) == len(text) + 8 - 1
            expected = reference.states(record.token_ids)[:, LAYERS]
            assert float((record.hidden_states - expected).abs().max()) < 1e-4


def test_windows_hold_the_positions_that_were_asked_for(served: Served) -> None:
    """Of the 8 tokens of "and this" and 7 that were generated: the prompt's last, and positions 5 to 11."""
    with Store.open(served.store) as store:
        _, whole, *windows = list_asked(store)
        assert [(one.first_position, len(one.token_ids), one.num_prompt_tokens) for one in windows] == [
            (7, 1, 1),
            (5, 7, 3),
        ]
        for one in windows:
            positions = slice(one.first_position, one.first_position + len(one.token_ids))
            assert one.token_ids.equal(whole.token_ids[positions])
            assert float((one.hidden_states - whole.hidden_states[positions]).abs().max()) < 1e-4


def test_records_are_found_by_the_id_that_the_client_saw(served: Served) -> None:
    with Store.open(served.store) as store:
        for answer in (served.answers[0], served.answers[2]):
            assert any(record.request_id.startswith(answer["id"]) for record in list_asked(store))


def test_vllms_own_metrics_count_what_was_captured(served: Served) -> None:
    with Store.open(served.store) as store:
        rows = sum(len(record.token_ids) for record in list_asked(store))
    expected = {"rows_total": rows, "bytes_total": rows * len(LAYERS) * 128 * 4, "records_total": 4}
    nothing = dict.fromkeys(("incomplete_records_total", "waits_total", "live_requests", "backlog"), 0)
    found = {name: value for name, value in served.scraped.items() if name.startswith(COUNTS)}
    assert found == {f"{COUNTS}{name}": value for name, value in (expected | nothing).items()}


def test_sigterm_in_the_middle_of_a_load_keeps_the_records_of_what_had_finished(
    served: Served, model: Path, soak: Any
) -> None:
    checks, reference = soak("soak_checks"), Reference(model)
    assert served.scraped_last["vllm:num_preemptions_total"] > 0
    with Store.open(served.store) as store:
        recorded = checks.sort_records(store, served.outcomes)
        counts = recorded.count()
        assert counts["requests"] == 60
        assert counts["finished"] >= 20
        assert counts["cut off"] > 0
        assert list(checks.find_wrong_records(recorded)) == []
        assert counts["incomplete records"] == 0
        compared = checks.compare_sample(recorded, 20, 1, lambda tokens: reference.states(tokens)[:, LAYERS])
    assert list(checks.find_wrong_states(compared, 20)) == []
