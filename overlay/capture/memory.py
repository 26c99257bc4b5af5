"""Capture into host memory, for programs that ask a worker for the states of one batch and know no store.

The taps and the accounting of rows are those of the store's capture. A cached prefix is not looked up: whoever takes
states from here has prefix caching off, and a row that was not computed is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_overlay.activation import current_ledger
from vllm_overlay.capture.limits import describe_runner
from vllm_overlay.capture.recorder import CaptureError, RequestFacts, refuse_bad_rows, refuse_other_tokens
from vllm_overlay.capture.rows import MISSING, WHOLE, NewRequest, Plan, RowBook, Rows, Step
from vllm_overlay.capture.taps import Taps, count_layers, find_decoder_layers, install_taps
from vllm_overlay.capture.transfer import find_peaks
from vllm_overlay.compat.releases import Seam, seam_for

# speculators 0.3 counts its calls and, in each, its prompts.
_PROMPT_OF_A_CALL = re.compile(r"req_\d+_(\d+)")


class MemoryCapture:
    """The tapped rows of one worker, from `begin` to `collect`.

    Nothing is kept before the first `begin`: a worker may warm up with invented requests.
    """

    def __init__(self, layer_ids: Sequence[int], taps: Taps, seam: Seam) -> None:
        self._layer_ids = tuple(layer_ids)
        self._taps = taps
        self._seam = seam
        self._book: RowBook | None = None
        self._requests: dict[str, RequestFacts] = {}
        self._rows: list[torch.Tensor] = []  # of each step, [tokens, layers, hidden]

    def begin(self) -> None:
        """Forget everything and keep the rows of the steps from now on."""
        self._book = RowBook(block_size=1, num_slots=0)
        self._requests, self._rows = {}, []

    def prepare_step(self, scheduler_output: Any) -> None:
        """Called before the model runs."""
        if scheduler_output.total_num_scheduled_tokens:
            self._taps.poison()

    def record_step(self, worker: Any, scheduler_output: Any) -> None:
        """Called when the model has run. Errors: CaptureError, RowError."""
        if self._book is None or not scheduler_output.total_num_scheduled_tokens:
            return
        plan = self._book.plan(self._read_step(self._book, worker, scheduler_output))
        rows = self._taps.buffer[: plan.count]
        self._check(plan, rows, self._seam.step_token_ids(worker)[: plan.count])
        self._rows.append(rows.to("cpu", copy=True))

    def collect(self) -> list[torch.Tensor] | None:
        """One tensor for each layer id, `[prompt tokens of all requests, hidden]` in the model's dtype on the host.

        The requests follow each other in their caller's order. What was kept is forgotten. None if no request ran.
        Errors: CaptureError naming the first request and position without a row.
        """
        if self._book is None or not self._requests:
            return None
        book, requests, rows = self._book, self._requests, self._rows
        self.begin()
        numbers = np.concatenate([_find_rows(book, requests[key]) for key in _sort_by_caller(requests)])
        index, together = torch.from_numpy(numbers), torch.cat(rows)
        return [together[:, column].index_select(0, index) for column in range(len(self._layer_ids))]

    def remove(self) -> None:
        """Take the taps out of the model."""
        self._taps.remove()

    def _read_step(self, book: RowBook, worker: Any, scheduler_output: Any) -> Step:
        cached = scheduler_output.scheduled_cached_reqs
        return Step(
            new=tuple(self._begin_request(book, request) for request in scheduler_output.scheduled_new_reqs),
            starts=dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)),
            more_blocks={},
            scheduled=scheduler_output.num_scheduled_tokens,
            order=self._seam.step_order(worker),
        )

    def _begin_request(self, book: RowBook, request: Any) -> NewRequest:
        key, num_computed = request.req_id, request.num_computed_tokens
        if key in book:
            # Model Runner V2 is sent a pre-empted request again as if it were new.
            return NewRequest(key, num_computed, (), resumed=True)
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int64)
        self._requests[key] = RequestFacts(key, prompt, tag=None, loss_spans=None)
        return NewRequest(key, num_computed, (), WHOLE)

    def _check(self, plan: Plan, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        refuse_bad_rows(plan, find_peaks(rows).cpu().numpy(), self._layer_ids, str)
        seen = tokens.cpu().numpy().astype(np.int64)
        for span in plan.spans:
            facts = self._requests[span.key]
            if span.start < len(facts.prompt):
                refuse_other_tokens(facts, span.start, seen[span.offset : span.offset + span.length])


def attach_memory(worker: Any, layer_ids: Sequence[int]) -> MemoryCapture:
    """Tap the worker's model and have every step of this worker recorded; `layer_ids` are ours.

    Errors: CaptureError for what is not captured, TapError for a model without such layers.
    """
    seam = seam_for(current_ledger().release)
    _refuse_unknown(worker, seam)
    config = worker.vllm_config
    model_config = config.model_config
    taps = install_taps(
        find_decoder_layers(worker.get_model(), count_layers(model_config.hf_text_config)),
        layer_ids,
        max_tokens=int(config.scheduler_config.max_num_batched_tokens),
        hidden_size=int(model_config.get_hidden_size()),
        dtype=model_config.dtype,
    )
    capture = MemoryCapture(layer_ids, taps, seam)
    step = worker.execute_model

    @functools.wraps(step)
    def step_and_record(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        capture.prepare_step(scheduler_output)
        output = step(scheduler_output, *args, **kwargs)
        capture.record_step(worker, scheduler_output)
        return output

    # On this one worker, which its program asked to capture; vLLM's class stays as it is.
    worker.execute_model = step_and_record
    return capture


def detach_memory(worker: Any, capture: MemoryCapture) -> None:
    """The worker and its model as they were."""
    capture.remove()
    del worker.execute_model


def _refuse_unknown(worker: Any, seam: Seam) -> None:
    refusal = describe_runner(seam.runner_style(worker), seam.CAPTURED_RUNNERS, current_ledger().vllm_version)
    if refusal:
        raise CaptureError(refusal)
    stages = worker.vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise CaptureError(f"pipeline_parallel_size={stages}: states are captured in one stage only; use 1")


def _sort_by_caller(keys: Iterable[str]) -> list[str]:
    """Requests in the order of their prompts; those of another caller in the order in which they were begun."""
    keys = list(keys)
    places = [_PROMPT_OF_A_CALL.fullmatch(key) for key in keys]
    if not all(places):
        return keys
    return [key for _, key in sorted((int(place[1]), key) for place, key in zip(places, keys, strict=True) if place)]


def _find_rows(book: RowBook, facts: RequestFacts) -> Rows:
    rows = book.find_rows(facts.request_id, len(facts.prompt))
    missing = np.flatnonzero(rows == MISSING)
    if len(missing):
        raise CaptureError(
            f"request {facts.request_id!r}, position {missing[0]}: its row was not computed since the capture was last "
            f"reset ({len(missing)} of {len(rows)} rows are missing); was it a cached prefix, or an unfinished prompt?"
        )
    return rows
