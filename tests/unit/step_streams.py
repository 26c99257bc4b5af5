"""A model of vLLM's scheduler and KV blocks that makes streams of steps, written from vLLM and not from the capture.

What is taken from vLLM 0.32.0, and where it stands there:
- vllm/v1/core/sched/scheduler.py: running requests first, then waiting ones until the token budget is spent; the last
  running request is pre-empted when blocks run out, and no waiting one is taken in that step; a pre-empted request
  starts from 0 or from what the cache still holds; rejected drafts take back the computed count; a request resumed for
  one token is padded with drafts that are rejected.
- vllm/v1/core/sched/async_scheduler.py: a step is made before the tokens of the one before it are known (`depth`).
- vllm/v1/core/kv_cache_manager.py: a hit ends one token before the request does; blocks count as cached when they are
  scheduled, so a neighbour may hit them in the very same step; drafts never count.
- vllm/v1/core/block_pool.py: a freed block stays cached until it is handed out again; blocks without a hash go first,
  cached ones in the order of their last use; several blocks may hold one prefix.
- vllm/v1/core/single_type_kv_cache_manager.py: with hashes finer than blocks, the prompt's last partial block is cached
  too. Whoever hits it gets a copy, made before the step, so it is not hit in the step that fills it.

The RULER model: the state of position p is the text up to p, itself. So a crossed row names what it was crossed with,
equal prefixes are equal, and a rejected draft ("x"), a token behind the end ("!") or graph padding shows at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_overlay.capture.finished import FinishedRequests, note_finished, take_finished

END, BEYOND, WRONG_DRAFT = ".", "!", "x"


@dataclass(frozen=True)
class Setup:
    """`hash_size` divides `block_size`. `depth` is how many steps are under way at once: 1 without async scheduling."""

    block_size: int
    hash_size: int
    num_blocks: int
    budget: int
    drafts: int
    depth: int
    runner: str  # V1 flags a resumed request, V2 announces it again as new
    full_attention: bool


@dataclass(eq=False)
class Request:
    """One request, as the scheduler knows it. `text` is the truth: the prompt, what the model generates, the end.

    `wanted`: the positions whose states the user asked for.
    """

    request_id: str
    num_prompt_tokens: int
    text: str
    wanted: range
    num_tokens: int  # prompt and generated tokens that the scheduler has seen
    computed: int = 0
    placeholders: int = 0  # tokens that steps under way will generate
    drafts: int = 0  # proposed for the next step
    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    in_flight: int = 0  # steps under way
    stale: int = 0  # of these, steps made before the last pre-emption
    announced: bool = False
    reason: str | None = None

    def get_finished_reason(self) -> str | None:
        return self.reason

    def prefix(self, length: int) -> str:
        return self.text[:length].ljust(length, BEYOND)


@dataclass(frozen=True)
class Entry:
    """What a step computes of one request. `blocks`: all of them if it is new or resumed, otherwise the added ones."""

    request: Request
    kind: str  # new, resumed or running
    start: int
    count: int
    drafts: int
    accepted: int
    samples: bool
    blocks: tuple[int, ...]
    table: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.count

    def code(self, position: int) -> str:
        """The state that the model computes there: of the text up to there, as far as it is not a wrong draft."""
        true_length = self.end - self.drafts + self.accepted
        return self.request.prefix(min(position + 1, true_length)).ljust(position + 1, WRONG_DRAFT)


@dataclass(frozen=True)
class ScheduledStep:
    entries: list[Entry]
    copies: list[tuple[int, int]]
    finished: FinishedRequests


class BlockPool:
    """Free blocks in the order in which they are handed out, and the prefixes that filled blocks are known by."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))  # block 0 is vLLM's null block
        self._references = [0] * num_blocks
        self._holders: dict[str, list[int]] = {}
        self._prefixes: dict[int, set[str]] = {}

    def take(self) -> int:
        block = self.free.pop(0)
        self._forget(block)
        self._references[block] = 1
        return block

    def touch(self, block: int) -> None:
        if self.is_free(block):
            self.free.remove(block)
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        plain, cached = list[int](), list[int]()
        for block in blocks:
            self._references[block] -= 1
            if self.is_free(block):
                (cached if self._prefixes.get(block) else plain).append(block)
        self.free[:0] = plain
        self.free += cached

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def find(self, prefix: str) -> int | None:
        holders = self._holders.get(prefix)
        return holders[0] if holders else None

    def cache(self, block: int, prefix: str, *, promote: bool) -> bool:
        """Whether the block was not known by this prefix. A block that becomes full loses its partial prefix."""
        if prefix in self._prefixes.get(block, ()):
            return False
        if promote:
            self._forget(block)
        self._prefixes.setdefault(block, set()).add(prefix)
        self._holders.setdefault(prefix, []).append(block)
        return True

    def _forget(self, block: int) -> None:
        for prefix in self._prefixes.pop(block, ()):
            self._holders[prefix].remove(block)


class Scheduler:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pool = BlockPool(setup.num_blocks)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._under_way: deque[ScheduledStep] = deque()
        self.finished: set[str] = set()  # ids that no step has carried yet
        self._partial_of_this_step: set[str] = set()
        self._preempted_this_step = False

    @property
    def live(self) -> list[Request]:
        return self.running + self.waiting

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.computed = request.placeholders = request.drafts = 0
        request.stale = request.in_flight
        self.waiting.insert(0, request)

    def finish(self, request: Request, reason: str) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        request.reason = reason
        note_finished(self, request)
        self.finished.add(request.request_id)
        self._free(request)

    def schedule(self, accepted: int) -> ScheduledStep:
        """The next step. `accepted` varies how many drafts the model will accept."""
        entries, copies = list[Entry](), list[tuple[int, int]]()
        self._partial_of_this_step.clear()
        self._preempted_this_step = False
        budget = self._schedule_running(entries, accepted)
        if not self._preempted_this_step:
            self._schedule_waiting(entries, copies, budget)
        self.pool.release(source for source, _ in copies)
        step = ScheduledStep(entries, copies, FinishedRequests(self.finished, take_finished(self)))
        self.finished = set()
        self._under_way.append(step)
        return step

    def deliver(self) -> None:
        """Take in what the steps generated that need not be under way any more."""
        while len(self._under_way) >= self.setup.depth:
            for entry in self._under_way.popleft().entries:
                self._take_output(entry)

    def _schedule_running(self, entries: list[Entry], accepted: int) -> int:
        budget = self.setup.budget
        for request in list(self.running):
            wanted = request.num_tokens + request.drafts + request.placeholders - request.computed
            count = min(wanted, budget)
            if not count or request not in self.running:
                continue
            if not self._make_room(request, count):
                break
            had = len(request.blocks)
            self._allocate(request, count)
            drafts = max(0, request.computed + count - request.num_tokens - request.placeholders)
            taken = (accepted + len(entries)) % (drafts + 1)
            entries.append(self._enter(request, "running", count, drafts, taken, tuple(request.blocks[had:])))
            budget -= count
        return budget

    def _schedule_waiting(self, entries: list[Entry], copies: list[tuple[int, int]], budget: int) -> None:
        for request in list(self.waiting):
            if not budget:
                return
            if request.stale:
                continue  # its output is still to come
            hit, num_hit = self._find_cached(request)
            count, drafts = request.num_tokens - num_hit, 0
            if count == 1 and num_hit and self.setup.drafts < budget:
                count, drafts = 1 + self.setup.drafts, self.setup.drafts
            count = min(count, budget)
            if not self._fits(num_hit + count, hit, num_hit):
                return
            self._adopt(request, hit, num_hit, copies)
            self._allocate(request, count)
            self.waiting.remove(request)
            self.running.append(request)
            kind = "resumed" if request.announced else "new"
            request.announced = True
            entries.append(self._enter(request, kind, count, drafts, 0, tuple(request.blocks)))
            budget -= count

    def _make_room(self, request: Request, count: int) -> bool:
        """Pre-empt the last running requests until this one has its blocks. False: it was pre-empted itself."""
        while self._num_missing_blocks(request.computed + count, len(request.blocks)) > len(self.pool.free):
            victim = self.running[-1]
            self.preempt(victim)
            self._preempted_this_step = True
            if victim is request:
                return False
        return True

    def _num_missing_blocks(self, end: int, held: int) -> int:
        return max(0, -(-(end + self.setup.drafts) // self.setup.block_size) - held)

    def _fits(self, end: int, hit: Sequence[int], num_hit: int) -> bool:
        copy = 1 if num_hit % self.setup.block_size else 0
        needed = self._num_missing_blocks(end, len(hit)) + copy + sum(map(self.pool.is_free, hit))
        return needed <= len(self.pool.free)

    def _find_cached(self, request: Request) -> tuple[list[int], int]:
        """Cached blocks of the longest known prefix and its length, at most all tokens but one."""
        size, fine, limit = self.setup.block_size, self.setup.hash_size, request.num_tokens - 1
        blocks: list[int] = []
        while (length := (len(blocks) + 1) * size) <= limit:
            block = self.pool.find(request.text[:length])
            if block is None:
                break
            blocks.append(block)
        num_hit = len(blocks) * size
        for length in range(min(num_hit + size - fine, limit // fine * fine), num_hit, -fine):
            block = self.pool.find(request.text[:length])
            if block is not None and request.text[:length] not in self._partial_of_this_step:
                return [*blocks, block], length
        return blocks, num_hit

    def _adopt(self, request: Request, hit: list[int], num_hit: int, copies: list[tuple[int, int]]) -> None:
        for block in hit:
            self.pool.touch(block)
        request.blocks, request.computed = list(hit), num_hit
        request.num_cached_blocks = num_hit // self.setup.block_size
        if num_hit % self.setup.block_size:
            request.blocks[-1] = self.pool.take()
            copies.append((hit[-1], request.blocks[-1]))

    def _allocate(self, request: Request, count: int) -> None:
        end = request.computed + count
        request.blocks += [self.pool.take() for _ in range(self._num_missing_blocks(end, len(request.blocks)))]
        self._cache_blocks(request, end)

    def _cache_blocks(self, request: Request, end: int) -> None:
        size, fine, end = self.setup.block_size, self.setup.hash_size, min(end, request.num_tokens)
        for index in range(request.num_cached_blocks, end // size):
            self.pool.cache(request.blocks[index], request.text[: (index + 1) * size], promote=True)
        request.num_cached_blocks = max(request.num_cached_blocks, end // size)
        tail = (request.num_prompt_tokens - 1) // fine * fine
        if not tail % size or tail > end:
            return
        if self.pool.cache(request.blocks[tail // size], request.text[:tail], promote=False):
            self._partial_of_this_step.add(request.text[:tail])

    def _enter(
        self, request: Request, kind: str, count: int, drafts: int, accepted: int, blocks: tuple[int, ...]
    ) -> Entry:
        start, known = request.computed, request.num_tokens + request.placeholders
        samples = start + count - drafts >= known
        request.computed += count
        request.placeholders += samples
        request.in_flight += 1
        request.drafts = 0
        return Entry(request, kind, start, count, drafts, accepted, samples, blocks, tuple(request.blocks))

    def _take_output(self, entry: Entry) -> None:
        request = entry.request
        request.in_flight -= 1
        stale = request.stale > 0
        request.stale -= stale
        if request.reason is not None or not entry.samples:
            return
        if not stale:
            request.computed -= entry.drafts - entry.accepted
            request.placeholders -= 1
            request.drafts = self.setup.drafts
        for _ in range(entry.accepted + 1):
            request.num_tokens += 1
            if request.num_tokens == len(request.text):
                self.finish(request, "stop")
                return
        if not stale:
            self._cache_blocks(request, request.computed - request.placeholders)

    def _free(self, request: Request) -> None:
        self.pool.release(reversed(request.blocks))
        request.blocks, request.num_cached_blocks = [], 0
