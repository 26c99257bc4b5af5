"""The load of a soak: requests of mixed lengths that share prefixes, and clients of which some hang up."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Token ids of the tests' tiny model that are plain characters: the ones below are special tokens.
TOKENS = range(4, 128)
FINISHED_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Mix:
    """What the requests are like: lengths in tokens, and of each 100 requests how many do what."""

    prefixes: int = 8
    longest_prefix: int = 96
    longest_rest: int = 64
    most_generated: int = 48
    with_prefix: int = 60
    streamed: int = 50
    ignore_end: int = 50
    hang_up: int = 20


@dataclass(frozen=True)
class Request:
    """One request. Its client hangs up after so many streamed tokens or so many seconds, if one of them is given."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_end: bool
    streamed: bool
    hang_up_after_tokens: int | None = None
    hang_up_after_s: float | None = None

    def to_json(self, model: str) -> dict[str, Any]:
        """The body of a completion request. The record's tag is the request's number."""
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "seed": self.number,
            "ignore_eos": self.ignore_end,
            "stream": self.streamed,
            "return_token_ids": True,
            "vllm_xargs": {"overlay": json.dumps({"tag": str(self.number)})},
        }


@dataclass(frozen=True)
class Outcome:
    """What a request's client saw: generated tokens, and how it ended. `error` is told if the server cut it off."""

    request: Request
    token_ids: tuple[int, ...]
    end: Literal["finished", "hung up", "cut off"]
    error: str = ""


def plan_requests(count: int, seed: int, mix: Mix = Mix()) -> list[Request]:
    """So many requests, the same for the same seed. Exactly `mix.hang_up` percent of them are hung up on."""
    chance = random.Random(seed)
    prefixes = [_choose_tokens(chance, chance.randint(16, mix.longest_prefix)) for _ in range(mix.prefixes)]
    impatient = set(chance.sample(range(count), count * mix.hang_up // 100))
    return [_plan_request(number, chance, prefixes, mix, number in impatient) for number in range(count)]


def _plan_request(
    number: int, chance: random.Random, prefixes: list[tuple[int, ...]], mix: Mix, impatient: bool
) -> Request:
    prefix = chance.choice(prefixes) if chance.randrange(100) < mix.with_prefix else ()
    streamed = chance.randrange(100) < mix.streamed
    max_tokens = chance.randint(1, mix.most_generated)
    return Request(
        number,
        prefix + _choose_tokens(chance, chance.randint(1, mix.longest_rest)),
        max_tokens,
        ignore_end=chance.randrange(100) < mix.ignore_end,
        streamed=streamed,
        hang_up_after_tokens=chance.randint(0, max_tokens - 1) if impatient and streamed else None,
        hang_up_after_s=chance.uniform(0.0, 0.3) if impatient and not streamed else None,
    )


def _choose_tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.choices(TOKENS, k=count))


def run_load(
    url: str,
    model: str,
    requests: Sequence[Request],
    clients: int,
    tell: Callable[[Outcome], None],
    seconds: float = 120,
) -> list[Outcome]:
    """Send the requests from so many clients at once; `tell` is called at the end of each, after `seconds` at most."""
    return asyncio.run(_run_clients(url, model, iter(requests), clients, tell, seconds))


async def _run_clients(
    url: str,
    model: str,
    requests: Iterator[Request],
    clients: int,
    tell: Callable[[Outcome], None],
    seconds: float,
) -> list[Outcome]:
    import aiohttp

    outcomes: list[Outcome] = []

    async def run_client() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session:
            for request in requests:  # whichever is next: the clients share the iterator
                outcomes.append(await _send(session, url, model, request))
                tell(outcomes[-1])

    await asyncio.gather(*(run_client() for _ in range(clients)))
    return outcomes


async def _send(session: Any, url: str, model: str, request: Request) -> Outcome:
    import aiohttp

    seen: list[int] = []
    try:
        return await asyncio.wait_for(_post(session, url, model, request, seen), request.hang_up_after_s)
    except asyncio.TimeoutError as error:
        # A session's own patience is far longer than any of a request's.
        hung_up = request.hang_up_after_s is not None
        return Outcome(request, tuple(seen), "hung up" if hung_up else "cut off", "" if hung_up else repr(error))
    except aiohttp.ClientError as error:
        return Outcome(request, tuple(seen), "cut off", repr(error))


async def _post(session: Any, url: str, model: str, request: Request, seen: list[int]) -> Outcome:
    async with session.post(f"{url}/v1/completions", json=request.to_json(model)) as response:
        if response.status != 200:
            return Outcome(request, (), "cut off", f"{response.status}: {(await response.text())[:300]}")
        choices = _read_stream(response) if request.streamed else _read_answer(response)
        return await _follow(request, choices, seen)


async def _follow(request: Request, choices: Any, seen: list[int]) -> Outcome:
    async for choice in choices:
        if request.hang_up_after_tokens is not None and len(seen) >= request.hang_up_after_tokens:
            return Outcome(request, tuple(seen), "hung up")
        seen.extend(choice["token_ids"] or ())
        if choice["finish_reason"] in FINISHED_REASONS:
            return Outcome(request, tuple(seen), "finished")
    return Outcome(request, tuple(seen), "cut off", "the answer ended without a finish reason of its own")


async def _read_answer(response: Any) -> Any:
    yield (await response.json())["choices"][0]


async def _read_stream(response: Any) -> Any:
    async for line in response.content:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            # An engine that ends sends an object of another kind.
            for choice in json.loads(data).get("choices", ()):
                yield choice
