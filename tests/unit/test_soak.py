"""tools/soak.py on stores that are written here: every kind of fault that it looks for is planted once and found."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_overlay.store import PendingRecord, Store, StoreMeta, StoreWriter

TOOLS = Path(__file__).resolve().parents[2] / "tools"
META = StoreMeta((1, 2), 4, "float32", 2, "toy", "f" * 64, "0.32.0", "V2")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("soak_load")


@pytest.fixture
def checks(load: Any) -> Any:
    return importlib.import_module("soak_checks")


class Written:
    """Three requests and their records: 0 finished, 1 finished, 2 hung up on after its first token."""

    def __init__(self, load: Any, folder: Path) -> None:
        self.folder = folder
        ends = ("finished", "finished", "hung up")
        seen = ((60, 61), (62, 63, 64), (65,))
        self.outcomes = [
            load.Outcome(load.Request(number, (10, 11, 12), 4, True, False), seen[number], ends[number])
            for number in range(3)
        ]
        tokens = ((10, 11, 12, 60), (10, 11, 12, 62, 63), (10, 11, 12, 65, 66))
        self.records = [self.describe(number, tokens[number], 5 * number) for number in range(3)]

    def describe(self, number: int, tokens: tuple[int, ...], first_row: int) -> PendingRecord:
        rows = np.arange(first_row, first_row + len(tokens))
        return PendingRecord(f"r{number}", np.array(tokens), rows, 3, True, "length", str(number), None)

    def open(self) -> Store:
        with StoreWriter.open(self.folder, META) as writer:
            writer.append(torch.arange(16 * 2 * 4, dtype=torch.float32).reshape(16, 2, 4))
            writer.commit(self.records)
        return Store.open(self.folder)


@pytest.fixture
def written(load: Any, tmp_path: Path) -> Iterator[Written]:
    yield Written(load, tmp_path / "store")


def find_faults(checks: Any, written: Written) -> list[str]:
    with written.open() as store:
        return list(checks.find_wrong_records(checks.sort_records(store, written.outcomes)))


def test_records_as_they_should_be(checks: Any, written: Written) -> None:
    assert find_faults(checks, written) == []


def test_a_finished_request_without_a_record(checks: Any, written: Written) -> None:
    del written.records[1]
    assert find_faults(checks, written) == ["request 1 (finished): expected 1 to 1 records, found 0"]


def test_a_request_that_was_hung_up_on_needs_none(checks: Any, written: Written) -> None:
    del written.records[2]
    assert find_faults(checks, written) == []


def test_two_records_of_one_request(checks: Any, written: Written) -> None:
    written.records.append(written.records[2])
    assert find_faults(checks, written) == ["request 2 (hung up): expected 0 to 1 records, found 2"]


@pytest.mark.parametrize(
    ("number", "tokens", "fault"),
    [
        (0, (10, 11, 12), "expected the 4 tokens sent and seen, found 3"),
        (1, (10, 11, 12, 62, 99), "expected the 5 tokens sent and seen, found 5"),
        (2, (10, 11, 12, 99), "not those that the client sent and saw"),
        (2, (10, 99), "not those that the client sent and saw"),
        (2, (10, 11, 12, 65, 66, 67, 68), "7 tokens, more than were asked for"),
    ],
)
def test_other_tokens(checks: Any, written: Written, number: int, tokens: tuple[int, ...], fault: str) -> None:
    changed = written.describe(number, tokens, 0)
    written.records[number] = replace(changed, num_prompt_tokens=min(3, len(tokens)))
    (line,) = find_faults(checks, written)
    assert line.startswith(f"request {number} (")
    assert fault in line


def test_another_number_of_prompt_tokens(checks: Any, written: Written) -> None:
    written.records[0] = replace(written.records[0], num_prompt_tokens=2)
    assert find_faults(checks, written) == ["request 0 (finished): expected 3 prompt tokens, found 2"]


def test_states_and_counts(checks: Any, written: Written) -> None:
    rows = np.array([0, -1, 2, 3])
    written.records[0] = replace(written.records[0], rows=rows, complete=False)
    with written.open() as store:
        recorded = checks.sort_records(store, written.outcomes)
        assert recorded.count()["incomplete records"] == 1
        assert recorded.count()["records of others"] == 1
        right = checks.compare_sample(recorded, 2, 1, lambda tokens: _states_of(written, tokens))
        assert (right.records, right.tokens, right.worst) == (2, 10, 0.0)
        assert list(checks.find_wrong_states(right, 2)) == []
        assert len(list(checks.find_wrong_states(right, 3))) == 1
        wrong = checks.compare_sample(recorded, 2, 1, lambda tokens: _states_of(written, tokens) + 0.5)
        assert list(checks.find_wrong_states(wrong, 2)) == [
            "states are 0.5 from the reference's, expected less than 0.0001"
        ]
        scraped = {"rows": 16.0, "bytes": 16.0 * 32, "records": 3.0, "incomplete_records": 1.0}
        named = {f"vllm_overlay_capture_{name}_total": value for name, value in scraped.items()}
        assert list(checks.find_wrong_counts(named, store)) == []
        assert len(list(checks.find_wrong_counts({}, store))) == 4
        (line,) = checks.find_wrong_counts(named | {"vllm_overlay_capture_records_total": 2.0}, store)
        assert line == "/metrics: expected vllm_overlay_capture_records_total of 3, found 2.0"


def _states_of(written: Written, tokens: torch.Tensor) -> torch.Tensor:
    """What `Written.open` wrote for the record with these tokens."""
    (record,) = [one for one in written.records if one.token_ids.tolist() == tokens.tolist()]
    every = torch.arange(16 * 2 * 4, dtype=torch.float32).reshape(16, 2, 4)
    return every[torch.from_numpy(record.rows)]


def test_a_request_that_the_server_let_down(load: Any, checks: Any, written: Written) -> None:
    written.outcomes[2] = replace(written.outcomes[2], end="cut off", error="500: boom-17")
    with written.open() as store:
        recorded = checks.sort_records(store, written.outcomes)
    assert list(checks.find_cut_off(recorded)) == ["request 2: 500: boom-17"]


def test_growth_is_that_of_the_last_half(checks: Any) -> None:
    mib = 2**20
    flat = [100 * mib + 10 * mib * min(number, 50) for number in range(100)]
    leaking = [100 * mib + mib * number for number in range(100)]
    growths = checks.measure_growth({"flat": flat, "leaking": leaking, "brief": [1, 2]})
    assert [(growth.process, round(growth.grown)) for growth in growths] == [("flat", 0), ("leaking", 50)]
    assert list(checks.find_grown(growths, [], 49.0)) == [
        "leaking: grew by 50.0 MiB in the last half, expected at most 49.0 above the 0.0 of plain vLLM"
    ]
    plain = [checks.Growth("leaking", 100.0, 100.0, 2.0), checks.Growth("flat", 100.0, 100.0, -7.0)]
    assert list(checks.find_grown(growths, plain, 49.0)) == []
    assert [line.partition(":")[0] for line in checks.find_grown(growths, plain, 47.9)] == ["leaking"]


def test_a_fifth_is_hung_up_on_and_the_same_seed_is_the_same_load(load: Any) -> None:
    requests = load.plan_requests(500, 3)
    assert requests == load.plan_requests(500, 3)
    impatient = [one for one in requests if (one.hang_up_after_tokens, one.hang_up_after_s) != (None, None)]
    assert len(impatient) == 100
    assert {one.streamed for one in requests} == {True, False}
    assert all(len(one.prompt) + one.max_tokens <= 256 for one in requests)
    starts = [one.prompt[:16] for one in requests if len(one.prompt) >= 16]
    assert max(starts.count(start) for start in set(starts)) > 20


async def _answer(request: Any) -> Any:
    """A server whose answer goes by the number of prompt tokens."""
    from aiohttp import web

    asked = await request.json()
    kind = len(asked["prompt"])
    if kind == 5:
        return web.Response(status=500, text="boom-17")
    if not asked["stream"]:
        await asyncio.sleep(5.0 if kind == 2 else 0.0)
        return web.json_response({"choices": [{"token_ids": [60, 61], "finish_reason": "length"}]})
    response = web.StreamResponse()
    await response.prepare(request)
    for token in (60, 61, 62):
        reason = "stop" if token == 62 and kind != 4 else None
        chunk = {"choices": [{"token_ids": [token], "finish_reason": reason}]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
def url() -> Iterator[str]:
    from aiohttp import web

    loop, started = asyncio.new_event_loop(), threading.Event()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))

        async def start() -> None:
            app = web.Application()
            app.router.add_post("/v1/completions", _answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.SockSite(runner, listening).start()
            started.set()

        threading.Thread(target=lambda: (loop.run_until_complete(start()), loop.run_forever()), daemon=True).start()
        assert started.wait(10)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        loop.call_soon_threadsafe(loop.stop)


def test_clients_see_how_each_request_ends(load: Any, url: str) -> None:
    def make(number: int, kind: int, **fields: Any) -> Any:
        return load.Request(number, tuple(range(kind)), 4, True, **fields)

    requests = [
        make(0, 1, streamed=True),
        make(1, 1, streamed=False),
        make(2, 3, streamed=True, hang_up_after_tokens=2),
        make(3, 2, streamed=False, hang_up_after_s=0.2),
        make(4, 4, streamed=True),
        make(5, 5, streamed=False),
    ]
    told: list[Any] = []
    outcomes = load.run_load(url, "model", requests, 3, told.append)
    assert sorted(one.request.number for one in told) == list(range(6))
    found = {one.request.number: (one.end, one.token_ids) for one in outcomes}
    assert found == {
        0: ("finished", (60, 61, 62)),
        1: ("finished", (60, 61)),
        2: ("hung up", (60, 61)),
        3: ("hung up", ()),
        4: ("cut off", (60, 61, 62)),
        5: ("cut off", ()),
    }
    assert next(one.error for one in outcomes if one.request.number == 5) == "500: boom-17"


def test_a_server_that_is_gone_cuts_requests_off(load: Any) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        (outcome,) = load.run_load(url, "model", [load.Request(0, (1,), 4, True, True)], 1, lambda outcome: None)
    assert outcome.end == "cut off"
    assert "Connect" in outcome.error


API_SERVER = """
import http.server, socket, sys

class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        text = f"records_total {sys.argv[2]}\\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

class Server(http.server.ThreadingHTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()

server = Server(("127.0.0.1", int(sys.argv[1])), Answer)
print("ready", flush=True)
server.serve_forever()
"""


def test_each_of_several_api_servers_is_asked(load: Any) -> None:
    """Two processes that share a port as vLLM's do, under the names that vLLM gives them."""
    module = importlib.import_module("soak_server")
    server = object.__new__(module.Server)
    server.process = SimpleNamespace(pid=os.getpid())
    with ExitStack() as stack:
        # Bound, so that nobody else gets the port, and not listened on.
        probe = stack.enter_context(socket.socket())
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("127.0.0.1", 0))
        server.port = probe.getsockname()[1]
        for number in range(2):
            words = [f"VLLM::APIServer_{number}", "-c", API_SERVER, str(server.port), str(17 + number)]
            child = stack.enter_context(subprocess.Popen(words, executable=sys.executable, stdout=subprocess.PIPE))
            stack.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        expected = {"VLLM::APIServer_0": {"records_total": 17.0}, "VLLM::APIServer_1": {"records_total": 18.0}}
        assert server.scrape_each() == expected
