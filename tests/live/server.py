"""What a live test needs of an API server that it starts itself."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.live.runs import kill_with_children


def find_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start: {log.read_text()[-4000:]}")


def ask(url: str, model: Path, **fields: Any) -> dict[str, Any]:
    """The answer to one completion of 8 tokens."""
    body = {"model": str(model), "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def ask_all_at_once(
    folder: Path, model: Path, prompts: dict[str, str], environment: dict[str, str], *options: str
) -> dict[str, str]:
    """Serve a model, ask for every prompt at once, each tagged with its key, and end the server. The requests' ids."""
    port, log = find_port(), folder / "server.log"
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]

    def ask_tagged(tag: str) -> str:
        tagged = {"overlay": json.dumps({"tag": tag})}
        return str(ask(f"http://127.0.0.1:{port}", model, prompt=prompts[tag], vllm_xargs=tagged)["id"])

    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *server, "--port", str(port), *options], env=environment, stdout=output, stderr=output
        )
        try:
            wait_until_ready(process, port, log)
            with ThreadPoolExecutor(len(prompts)) as pool:
                ids = dict(zip(prompts, pool.map(ask_tagged, prompts), strict=True))
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            kill_with_children(process)
    return ids
