"""The server of a soak: `vllm serve` with capture, its metrics, and the memory of its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

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
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        values: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] += sample.value
        return dict(values)

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
