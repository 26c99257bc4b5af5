"""A worker that fails: what `LLM`, its `generate` and a client of the API server are told, how soon, and what is left.

CASES 21, 22 and 23, on real engines whose worker class is `scripts/failing_worker.py`'s.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.killed import expect_the_rank, expect_whole_records, kill_a_rank
from tests.live.runs import ENGINE, Batch, clean_environment, list_processes
from tests.live.server import find_port, wait_until_ready
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.live

SCRIPTS = Path(__file__).parent / "scripts"
# CASES 23.
LIMIT_S = 30.0
# Marks every process of a run.
MARK = "FAILING_RUN"


@dataclass(frozen=True)
class Told:
    """The error of one call; `seconds` from the worker's failure to its caller."""

    kind: str
    text: str
    seconds: float


def plan(folder: Path, at: str, how: str, rank: int | None = None) -> dict[str, str]:
    only = {} if rank is None else {"FAIL_RANK": str(rank)}
    # The worker class is found by a name that every process must be able to import.
    words = {"VLLM_OVERLAY": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")])}
    # A CPU for each of two ranks: left to itself, vLLM wants a NUMA node for each, and 0.11.0 knows no "nobind".
    cpus = sorted(os.sched_getaffinity(0))
    words["VLLM_CPU_OMP_THREADS_BIND"] = f"{cpus[0]}|{cpus[-1]}"
    clock = str(folder / "clock")
    return words | only | {"FAIL_AT": at, "FAIL_AS": how, "FAIL_CLOCK": clock, MARK: uuid.uuid4().hex}


def fail(folder: Path, model: Path, variables: dict[str, str], **engine: Any) -> dict[str, Told]:
    """Run the user's script; what each of its calls was told. No process may be left."""
    arguments, out = folder / "engine.json", folder / "out.json"
    arguments.write_text(json.dumps(ENGINE | {"model": str(model)} | engine))
    command = [sys.executable, str(SCRIPTS / "catch_failure.py"), str(arguments), str(out)]
    done = subprocess.run(
        command, env=clean_environment(variables), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert find_processes(variables[MARK]) == []
    return {call: Told(*error) for call, error in json.loads(out.read_text()).items()}


def find_processes(mark: str, patience_s: float = 10.0) -> list[str]:
    """The processes of a run that live on after it, with some time to end."""
    until = time.monotonic() + patience_s
    while (left := list_processes(MARK, mark)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def expect(told: Told, kind: str, text: str, *, rank: int, function: str) -> None:
    """The error names the worker's exception, its rank, its file and line, and holds its traceback."""
    expect_text(told.text, text, rank, function, file=str(SCRIPTS / "failing_worker.py"))
    assert told.kind == kind
    assert told.seconds < LIMIT_S


def expect_text(told: str, text: str, rank: int, function: str, file: str) -> None:
    pattern = rf'{re.escape(text)} \(rank {rank}, \w+ process \d+, file "{re.escape(file)}", line \d+, in {function}: '
    assert re.search(pattern, told), told
    assert "Traceback (most recent call last):" in told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), layers=2, spread=0.05)


def test_a_start_that_fails_in_rank_1_only(tmp_path: Path, model: Path) -> None:
    told = fail(tmp_path, model, plan(tmp_path, "load_model", "value_error", rank=1), tensor_parallel_size=2)
    assert set(told) == {"start"}
    expect(told["start"], "RuntimeError", "ValueError: boom-17", rank=1, function="value_error")
    assert told["start"].text.startswith("Engine core initialization failed.")


def test_a_start_that_fails_with_what_cannot_be_pickled(tmp_path: Path, model: Path) -> None:
    told = fail(tmp_path, model, plan(tmp_path, "init_device", "particular"))
    expect(told["start"], "RuntimeError", "Particular: particular 17 at here", rank=0, function="particular")


def test_a_call_and_a_step_that_fail_in_rank_1_only(tmp_path: Path, model: Path) -> None:
    """With a bare assert. The other rank waits in a collective operation meanwhile."""
    told = fail(tmp_path, model, plan(tmp_path, "call+step", "bare_assert", rank=1), tensor_parallel_size=2)
    assert set(told) == {"call", "generate"}
    for call, kind in (("call", "Exception"), ("generate", "EngineDeadError")):
        expect(told[call], kind, "AssertionError: (no message)", rank=1, function="bare_assert")


def test_a_rank_that_is_killed_while_it_captures(tmp_path: Path, model: Path) -> None:
    """The out-of-memory killer leaves no exception behind."""
    batches = [Batch([[5, 6, 7, 8], [9, 10, 11]], 3)]
    cpus = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_OVERLAY": "1",
        "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"),
        "VLLM_OVERLAY_LAYERS": "all",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}",
    }
    killed = kill_a_rank(tmp_path / "run", model, batches, environment, tensor_parallel_size=2)
    expect_the_rank(killed)
    expect_whole_records(killed, batches, tmp_path / "store")


def test_a_step_whose_clean_up_fails_too(tmp_path: Path, model: Path) -> None:
    """The first error, which was raised while another was handled, is the one that is told."""
    told = fail(tmp_path, model, plan(tmp_path, "step+shutdown", "while_handled"))
    assert set(told) == {"generate"}
    expect(told["generate"], "EngineDeadError", "ValueError: second-18", rank=0, function="while_handled")
    assert "KeyError: 'first-17'" in told["generate"].text
    assert "clean-up-99" not in told["generate"].text.partition("ValueError: second-18")[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[int, str, str]]:
    """Status and body of a request whose step failed, and the server's log."""
    folder = tmp_path_factory.mktemp("served")
    log, port, variables = folder / "log", find_port(), plan(folder, "step", "bare_assert")
    words = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--port", str(port)]
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", *words]
    command = [sys.executable, *server, "--worker-cls", "failing_worker.FailingWorker"]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=clean_environment(variables), stdout=output, stderr=output)
        try:
            wait_until_ready(process, port, log)
            status, body = ask(port, model)
            process.wait(60)
        finally:
            process.kill()
    assert find_processes(variables[MARK]) == []
    yield status, body, log.read_text()


def ask(port: int, model: Path) -> tuple[int, str]:
    body = json.dumps({"model": str(model), "prompt": "hello there", "max_tokens": 2}).encode()
    address, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data=body, headers=kind), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_servers_client_and_its_log_are_told(served: tuple[int, str, str]) -> None:
    _, body, log = served
    # Newer servers leave paths out of what they tell their clients.
    message = json.loads(body)["error"]["message"].replace(str(SCRIPTS / "failing_worker.py"), "<path>")
    expect_text(message, "AssertionError: (no message)", 0, "bare_assert", file="<path>")
    assert "EngineDeadError: EngineCore encountered an issue." in log
    expect_text(log, "AssertionError: (no message)", 0, "bare_assert", file=str(SCRIPTS / "failing_worker.py"))
