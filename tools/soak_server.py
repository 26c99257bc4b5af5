"""The server of a soak: `vllm serve` with capture, its metrics, and the memory of its processes."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

SERVE = Path(__file__).with_name("serve.py")
SAMPLE_EVERY_S = 1.0


class ServerError(RuntimeError):
    """The server did not start, did not answer, or did not end."""


class Server:
    """`vllm serve MODEL` in processes of its own. As a context manager it is killed if it still runs at the end."""

    def __init__(self, model: Path, options: list[str], environment: Mapping[str, str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        words = [sys.executable, str(SERVE), "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("w") as out:
            self.process = subprocess.Popen([*words, *options], env=environment, stdout=out, stderr=subprocess.STDOUT)

    def wait_until_ready(self, seconds: float = 300) -> None:
        """Errors: ServerError with the end of the log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise ServerError(f"the server did not start; the end of its log:\n{self.read_log()}")

    def scrape(self) -> dict[str, float]:
        """What /metrics says now, by sample, summed over labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            return _read_samples(response.read().decode())

    def scrape_each(self, seconds: float = 60) -> dict[str, dict[str, float]]:
        """What /metrics says now in each of vLLM's API servers, by its name: a connection goes to whichever takes it.

        Errors: ServerError when one of them has taken none in all that time.
        """
        servers = _list_api_servers(self.process.pid)
        found: dict[str, dict[str, float]] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(servers) and time.monotonic() < deadline:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
                connection.request("GET", "/metrics")
                samples = _read_samples(connection.getresponse().read().decode())
                found[_find_taker(servers, connection.sock.getsockname()[1])] = samples
        if len(found) < len(servers):
            raise ServerError(f"of the API servers {sorted(servers)}, only {sorted(found)} answered in {seconds} s")
        return found

    def scrape_when(self, is_quiet: Callable[[Mapping[str, float]], bool], seconds: float = 30) -> dict[str, float]:
        """The second of two equal scrapes in a row, a second apart, that are quiet. Errors: ServerError."""
        deadline = time.monotonic() + seconds
        before: dict[str, float] = {}
        while time.monotonic() < deadline:
            now = self.scrape()
            ours = {name: value for name, value in now.items() if name.startswith("vllm_overlay")}
            if ours == before and is_quiet(now):
                return now
            before = ours
            time.sleep(1.0)
        raise ServerError(f"/metrics did not come to rest within {seconds} s: {before}")

    def terminate(self) -> None:
        """SIGTERM, and nothing else."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = 120) -> int:
        """The exit status. Errors: ServerError when it does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the server did not end within {seconds} s of SIGTERM:\n{self.read_log()}") from None

    def read_log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _read_samples(text: str) -> dict[str, float]:
    """Of what /metrics says, by sample, summed over labels."""
    from prometheus_client.parser import text_string_to_metric_families

    values: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
    return dict(values)


def _list_api_servers(pid: int) -> dict[str, Any]:
    """The processes that answer, by name: `VLLM::APIServer_0` and so on, or the only one."""
    import psutil  # vLLM requires it

    root = psutil.Process(pid)
    titles = {(process.cmdline() or [""])[0]: process for process in root.children(recursive=True)}
    several = {title: process for title, process in titles.items() if title.startswith("VLLM::APIServer")}
    return several or {"server": root}


def _find_taker(servers: Mapping[str, Any], port: int) -> str:
    """Which of them has the other end of a connection from our `port`."""
    [taker] = [name for name, server in servers.items() if port in _list_peers(server.net_connections("tcp"))]
    return taker


def _list_peers(connections: Sequence[Any]) -> set[int]:
    return {connection.raddr.port for connection in connections if connection.raddr}


class MemorySampler:
    """The resident memory in bytes of the server's processes, about once a second, by what they are."""

    def __init__(self, server: Server) -> None:
        self.samples: defaultdict[str, list[int]] = defaultdict(list)
        self._pid = server.process.pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            for name, size in _read_memory(self._pid).items():
                self.samples[name].append(size)


def _read_memory(pid: int) -> dict[str, int]:
    """By process of the tree. A process that ends meanwhile is left out."""
    import psutil  # vLLM requires it

    found: defaultdict[str, int] = defaultdict(int)
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            title = (process.cmdline() or [""])[0]
            name = title if title.startswith("VLLM::") else "server" if process.pid == pid else "helpers"
            found[name] += process.memory_info().rss
    except psutil.NoSuchProcess:
        return {}
    return dict(found)


def make_environment(store: Path | None, layers: str) -> dict[str, str]:
    """This environment with capture into `store` on, or with no overlay, and none of its other VLLM_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "_VLLM_"))}
    capture = {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(store), "VLLM_OVERLAY_LAYERS": layers}
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return kept | small | (capture if store else {})
