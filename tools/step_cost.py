"""What capture costs the host at each step, in microseconds, without vLLM.

usage: python tools/step_cost.py [--requests 256 1024] [--steps 256] [--prompt 128] [--tokens all] [--store FOLDER]

Plays a server's steps to a capture session on made-up objects that have what a scheduler's output has: one step that
computes all prompts, of which no two neighbours end at the same place of a KV block, then steps of one token for each
request, then a step after which all requests have ended. Rows are 32 bytes: what is left does not depend on their size.
The first 8 decode steps are not counted.

The parts, for each decode step, as medians over the steps (a busy machine makes single ones many times slower):

    read      the scheduler's output is taken apart (CaptureSession._read_step)
    plan      every row gets its request, position and number (RowBook.plan)
    send      the rows are copied: on a CPU by torch (CpuTransfer.send); where there is a GPU the rows are on it, and
              this is what starting their way to the host takes (CudaTransfer.send)
    post      what the writer's thread is to do is put into its queue (Recorder.write)
    step      all of it as the thread that runs the model sees it, with the writer's thread at work beside it
    writer    CPU time of the writer's thread, mean; it holds the interpreter's lock for most of it. Steps of the same
              tenth of a second are written together, and here they come faster than from a model

and for each request that ends: `finish`, on the thread that runs the model, and `record`, CPU time of the writer's
thread. `flush` is for all requests together, from the call to the end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_overlay.capture.finished import FinishedRequest, FinishedRequests
from vllm_overlay.capture.recorder import Recorder
from vllm_overlay.capture.row_tokens import CHUNK_ROWS
from vllm_overlay.capture.rows import RowBook
from vllm_overlay.capture.session import FEWEST_CHUNKS, CaptureSession
from vllm_overlay.capture.taps import Taps
from vllm_overlay.capture.transfer import open_transfer
from vllm_overlay.store import StoreMeta, StoreWriter

META = StoreMeta((1, 2), 4, "float32", 2, "made up", "f" * 64, "none", "V1")
BLOCK_SIZE = 16
WARM_UP_STEPS = 8
TOKEN = 7  # of every position of every prompt


class Clock:
    """Seconds of each call, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds.setdefault(part, []).append(time.perf_counter() - started)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time every call of this method."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            with self.timing(part):
                return call(*args)

        setattr(owner, name, timed)


class PlayedSession(CaptureSession):
    """A session with the parts that a step uses, of a worker that there is not."""

    def __init__(self, recorder: Recorder, num_requests: int, max_tokens: int, num_blocks: int, tokens: str) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        buffer = torch.ones(max_tokens, len(META.layer_ids), META.hidden_size, device=device)
        self._settings: Any = SimpleNamespace(sample=1.0, tokens=tokens)
        self._recorder = recorder
        self._taps = Taps(META.layer_ids, buffer, ())
        self._transfer = open_transfer(buffer, "auto")
        self._book = RowBook(block_size=BLOCK_SIZE, num_slots=num_blocks * BLOCK_SIZE)
        self._kv_group = 0
        self._num_begun = 0
        self._last_ended = 0
        self._recording = True
        self._look_at_row = FEWEST_CHUNKS * CHUNK_ROWS
        keys = tuple(f"{number}-0a1b2c3d" for number in range(num_requests))
        token_ids = torch.full((max_tokens,), TOKEN, dtype=torch.int32, device=device)
        self._seam: Any = SimpleNamespace(
            step_order=lambda worker: keys,
            step_token_ids=lambda worker: token_ids,
            resumed_requests=lambda cached: set(),
            block_copies=lambda scheduler_output: (),
            external_request_id=str,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024], help="default: 256 1024")
    parser.add_argument("--steps", type=int, default=256, help="decode steps (default: 256)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument(
        "--tokens", choices=("all", "prompt", "last"), default="all", help="VLLM_OVERLAY_TOKENS (default: all)"
    )
    parser.add_argument("--store", help="folder for the store (default: a temporary one)")
    args = parser.parse_args()
    for num_requests in args.requests:
        with tempfile.TemporaryDirectory(prefix="vllm-overlay-step-cost-", dir=args.store) as folder:
            costs = measure(Path(folder) / "store", num_requests, args.prompt, args.steps, args.tokens)
        print(f"{num_requests} requests: " + ", ".join(f"{part} {cost:.1f}" for part, cost in costs.items()))
    return 0


def measure(store: Path, num_requests: int, prompt: int, steps: int, tokens: str = "all") -> dict[str, float]:
    """Microseconds by part."""
    recorder = Recorder(StoreWriter.open(store, META), META.layer_ids)
    blocks_each = -(-(prompt + steps) // BLOCK_SIZE) + 1
    session: Any = PlayedSession(
        recorder, num_requests, num_requests * (prompt + BLOCK_SIZE), num_requests * blocks_each, tokens
    )
    keys = session._seam.step_order(None)
    session.record_step(None, prefill(keys, prompt, blocks_each))
    clock = Clock()
    for number in range(steps):
        if number == WARM_UP_STEPS:
            session.flush()
            clock.wrap(session, "_read_step", "read")
            clock.wrap(session._book, "plan", "plan")
            clock.wrap(session._transfer, "send", "send")
            clock.wrap(session._recorder, "write", "post")
            busy = writer_seconds(recorder)
        step = decode(keys, prompt, number, blocks_each)
        with clock.timing("step" if number >= WARM_UP_STEPS else "warm-up"):
            session.record_step(None, step)
    session.flush()
    busy = writer_seconds(recorder) - busy
    costs = {part: statistics.median(seconds) for part, seconds in clock.seconds.items() if part != "warm-up"}
    costs["writer"] = busy / (steps - WARM_UP_STEPS)
    costs |= measure_end(session, keys, prompt, steps)
    session.close([])
    return {part: seconds * 1e6 for part, seconds in costs.items()}


def measure_end(session: Any, keys: tuple[str, ...], prompt: int, steps: int) -> dict[str, float]:
    """Seconds for each request that ends, and for the flush of all of them."""
    lengths = [prompt_of(number, prompt) + steps + 1 for number in range(len(keys))]
    ended = zip(keys, lengths, range(1, len(keys) + 1), strict=True)
    facts = {key: FinishedRequest(length, "length", serial) for key, length, serial in ended}
    finished_requests = FinishedRequests(set(keys), facts)
    before, started = writer_seconds(session._recorder), time.perf_counter()
    session.hear_of_ended(SimpleNamespace(finished_req_ids=finished_requests, total_num_scheduled_tokens=0))
    finished = time.perf_counter()
    session.flush()
    flushed = time.perf_counter()
    record = (writer_seconds(session._recorder) - before) / len(keys)
    return {"finish": (finished - started) / len(keys), "record": record, "flush": flushed - finished}


def writer_seconds(recorder: Recorder) -> float:
    """CPU seconds of the writer's thread so far."""
    identity = recorder._thread.ident
    assert identity is not None
    return time.clock_gettime(time.pthread_getcpuclockid(identity))


def prompt_of(number: int, prompt: int) -> int:
    """Tokens of the prompt of a request: `prompt` to `prompt + BLOCK_SIZE - 1`."""
    return prompt + number % BLOCK_SIZE


def prefill(keys: tuple[str, ...], prompt: int, blocks_each: int) -> Any:
    new = []
    for number, key in enumerate(keys):
        length, first = prompt_of(number, prompt), number * blocks_each
        new.append(
            SimpleNamespace(
                req_id=key,
                prompt_token_ids=[TOKEN] * length,
                mm_features=[],
                sampling_params=None,
                num_computed_tokens=0,
                block_ids=(list(range(first, first + -(-length // BLOCK_SIZE))),),
            )
        )
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[])
    return scheduler_output(new, cached, {key: prompt_of(number, prompt) for number, key in enumerate(keys)})


def decode(keys: tuple[str, ...], prompt: int, step: int, blocks_each: int) -> Any:
    """A token for every request; vLLM lists them in an order of its own."""
    positions = [prompt_of(number, prompt) + step for number in range(len(keys))]
    blocks = [
        None if position % BLOCK_SIZE else ([number * blocks_each + position // BLOCK_SIZE],)
        for number, position in enumerate(positions)
    ]
    cached = SimpleNamespace(req_ids=list(keys[::-1]), num_computed_tokens=positions[::-1], new_block_ids=blocks[::-1])
    return scheduler_output([], cached, dict.fromkeys(keys[::-1], 1))


def scheduler_output(new: list[Any], cached: Any, scheduled: dict[str, int]) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=FinishedRequests(set(), {}),
    )


if __name__ == "__main__":
    sys.exit(main())
