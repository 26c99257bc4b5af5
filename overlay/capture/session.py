"""One worker's capture, from the opened store to the last record: owns the taps, the rows and the recorder."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from vllm_overlay.activation import current_ledger, current_settings
from vllm_overlay.capture.counts import COUNTS, CountsFile
from vllm_overlay.capture.finished import FinishedRequest, FinishedRequests
from vllm_overlay.capture.limits import (
    CONTEXT_PARALLEL_SIZES,
    describe_context_parallelism,
    describe_runner,
    describe_sharded_stream,
    describe_streams,
)
from vllm_overlay.capture.options import read_options
from vllm_overlay.capture.ranks import Place, Share, find_share
from vllm_overlay.capture.recorder import CaptureError, Recorder, RequestFacts
from vllm_overlay.capture.row_tokens import CHUNK_ROWS
from vllm_overlay.capture.rows import NOTHING, NewRequest, RowBook, Step
from vllm_overlay.capture.taps import Taps, count_layers, find_decoder_layers, install_taps
from vllm_overlay.capture.transfer import Transfer, open_transfer
from vllm_overlay.compat.releases import Seam, seam_for
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.layer_ids import resolve_layer_ids
from vllm_overlay.settings import Settings
from vllm_overlay.store import Part, StoreMeta, StoreWriter, float8

logger = logging.getLogger("vllm_overlay.capture")

# 4 MiB of tokens: below that, nobody looks whether some could be dropped.
FEWEST_CHUNKS = 16


def open_session(worker: Any) -> CaptureSession | Bystander:
    """What this worker does for capture, decided before its weights are read. Errors: CaptureError, StoreError."""
    settings, seam, config = current_settings(), seam_for(current_ledger().release), worker.vllm_config
    _refuse_parallelism(config, seam)
    runner = seam.runner_style(worker)
    refusal = describe_runner(runner, seam.CAPTURED_RUNNERS, current_ledger().vllm_version)
    # Looked at again in the built model; here it is known before the weights are read.
    refusal = refusal or describe_streams(config.model_config.hf_text_config.to_dict())
    if refusal:
        raise CaptureError(refusal)
    num_hidden_layers = count_layers(config.model_config.hf_text_config)
    layer_ids = resolve_layer_ids(settings.layers, num_hidden_layers)
    share = find_share(layer_ids, Place(*seam.worker_place(num_hidden_layers)))
    if share is None:
        return Bystander()
    return CaptureSession(config, settings, seam, Capture(layer_ids, num_hidden_layers, runner, share))


@dataclass(frozen=True)
class Capture:
    """What the engine was asked for, `layer_ids` of a target of so many layers, and this rank's share of it."""

    layer_ids: tuple[int, ...]
    num_hidden_layers: int
    runner: str
    share: Share


class Bystander:
    """A worker whose rows another rank captures. It answers what a session answers."""

    def install_taps(self, worker: Any) -> None:
        """This rank's layers are tapped elsewhere, or none of them was asked for."""

    def prepare_step(self, scheduler_output: Any) -> None:
        """Called before the model runs."""

    def hear_of_ended(self, scheduler_output: Any) -> None:
        """Called before the model runs."""

    def record_step(self, worker: Any, scheduler_output: Any) -> None:
        """Called when the model has run."""

    def start(self) -> None:
        """The rank that captures starts."""

    def stop(self) -> None:
        """The rank that captures stops."""

    def flush(self) -> None:
        """There is nothing to commit."""

    def statistics(self) -> dict[str, int]:
        """No counts: those of all ranks can be added up."""
        return dict.fromkeys(COUNTS, 0)

    def close(self, ended: Iterable[tuple[str, int, str, int]]) -> None:
        """There is nothing to write."""


class CaptureSession:
    """Captures every step of one worker. Made before the weights are read, so that it can refuse early."""

    def __init__(self, config: Any, settings: Settings, seam: Seam, capture: Capture) -> None:
        self._settings = settings
        self._seam = seam
        self._capture = capture
        self._hidden_size = int(config.model_config.get_hidden_size())
        self._dtype: torch.dtype = config.model_config.dtype
        self._max_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self.layer_ids = tuple(capture.layer_ids[column] for column in capture.share.columns)
        self._recorder = self._open_recorder(config)
        self._taps: Taps | None = None
        self._transfer: Transfer | None = None
        self._book: RowBook | None = None
        self._kv_group = 0
        self._num_begun = 0
        self._last_ended = 0  # serial
        self._recording = True
        self._look_at_row = FEWEST_CHUNKS * CHUNK_ROWS
        counts_file = CountsFile(self._recorder.log)
        # Last: the writer's thread calls it from here on.
        self._recorder.call_after_commits(lambda: counts_file.write(self.statistics()))

    def install_taps(self, worker: Any) -> None:
        """Tap the model that the worker has built. Errors: TapError."""
        layers = find_decoder_layers(worker.get_model(), self._capture.num_hidden_layers)
        self._taps = install_taps(
            layers,
            self.layer_ids,
            max_tokens=self._max_tokens,
            hidden_size=self._hidden_size,
            dtype=self._dtype,
        )
        self._transfer = open_transfer(self._taps.buffer, self._settings.dtype)
        logger.info("capturing layers %s into %s", self.layer_ids, self._settings.capture)

    @property
    def taps(self) -> Taps | None:
        """The taps of the model; None before it is built."""
        return self._taps

    def prepare_step(self, scheduler_output: Any) -> None:
        """Called before the model runs: make it seen when a tap does not fire."""
        if self._taps is not None and scheduler_output.total_num_scheduled_tokens:
            self._taps.poison()

    def hear_of_ended(self, scheduler_output: Any) -> None:
        """Write the records of the requests that ended before this step, whatever becomes of it."""
        self._finish_requests(scheduler_output.finished_req_ids)

    def record_step(self, worker: Any, scheduler_output: Any) -> None:
        """Called when the model has run: write this step's rows."""
        assert self._taps is not None and self._transfer is not None
        if self._book is None:
            self._book = self._open_book(worker.model_runner.kv_cache_config)
        if not scheduler_output.total_num_scheduled_tokens:
            return
        step = self._read_step(worker, scheduler_output)
        plan = self._book.plan(step)
        if plan.count:
            tokens = self._seam.step_token_ids(worker)
            self._recorder.write(plan, self._transfer.send(plan.count, plan.indices, tokens))
            self._drop_old_tokens(self._book)

    def start(self) -> None:
        """Capture the requests that begin from now on."""
        self._recording = True

    def stop(self) -> None:
        """Requests that begin from now on are not captured; those under way are finished."""
        self._recording = False

    def flush(self) -> None:
        """Return when every finished request is committed. Errors: CaptureError."""
        self._recorder.flush()

    def statistics(self) -> dict[str, int]:
        """Counts since the session began, as plain numbers."""
        statistics = self._recorder.statistics
        return {
            "rows": statistics.num_rows,
            "bytes": statistics.num_bytes,
            "records": statistics.num_records,
            "incomplete_records": statistics.num_incomplete,
            "waits": self._transfer.num_waits if self._transfer else 0,
            "live_requests": self._book.num_live if self._book else 0,
            "backlog": self._recorder.backlog,
        }

    def close(self, ended: Iterable[tuple[str, int, str, int]]) -> None:
        """Write the records of these last requests (key, tokens, reason, serial), flush and close the store."""
        last = list(ended)
        try:
            self._finish_all(last)
        except SystemExit:
            # vLLM raises it once, from its handler of SIGTERM, wherever this process is.
            self._finish_all(last)
            raise
        finally:
            self._recorder.close()
            self._warn_of_incomplete()
            if self._taps is not None:
                self._taps.remove()

    def _drop_old_tokens(self, book: RowBook) -> None:
        """A server runs for days: when chunks of tokens may be twice as many as last time, drop what none needs."""
        if book.num_rows < self._look_at_row:
            return
        live = book.find_live_chunks(CHUNK_ROWS)
        self._recorder.keep_tokens(live)
        self._look_at_row = book.num_rows + max(len(live), FEWEST_CHUNKS) * CHUNK_ROWS

    def _finish_all(self, ended: Iterable[tuple[str, int, str, int]]) -> None:
        for key, num_tokens, reason, serial in sorted(ended, key=lambda one: one[3]):
            self._finish(key, FinishedRequest(num_tokens, reason, serial))

    def _warn_of_incomplete(self) -> None:
        statistics = self._recorder.statistics
        if statistics.num_incomplete:
            logger.warning(
                "%d of %d records are incomplete: rows of their cached prefixes were not captured",
                statistics.num_incomplete,
                statistics.num_records,
            )

    def _open_recorder(self, config: Any) -> Recorder:
        assert self._settings.capture is not None
        model = str(config.model_config.model)
        meta = StoreMeta(
            layer_ids=self._capture.layer_ids,
            hidden_size=self._hidden_size,
            dtype=float8.DTYPE if self._settings.dtype == "fp8" else str(self._dtype).removeprefix("torch."),
            num_hidden_layers=self._capture.num_hidden_layers,
            model=model,
            model_fingerprint=fingerprint_model(model, config.model_config.hf_config.to_dict()),
            vllm_version=current_ledger().vllm_version,
            runner=self._capture.runner,
        )
        return Recorder(
            StoreWriter.open(self._settings.capture, meta, part=self._describe_part(config)), self.layer_ids
        )

    def _describe_part(self, config: Any) -> Part | None:
        """What tells the pipeline stages' logs of this engine which rows belong together; None for an only writer."""
        share = self._capture.share
        if share.num_parts == 1 and len(share.columns) == len(self._capture.layer_ids):
            return None
        session = f"{config.instance_id}-{config.parallel_config.data_parallel_rank}"
        return Part(session, share.part, share.num_parts, share.columns)

    def _open_book(self, kv_cache_config: Any) -> RowBook:
        group = self._seam.full_attention_group(kv_cache_config)
        if group is None:
            return RowBook(block_size=1, num_slots=0)
        self._kv_group, block_size = group
        return RowBook(block_size=block_size, num_slots=int(kv_cache_config.num_blocks) * block_size)

    def _read_step(self, worker: Any, scheduler_output: Any) -> Step:
        assert self._book is not None
        cached = scheduler_output.scheduled_cached_reqs
        new = [self._begin(request) for request in scheduler_output.scheduled_new_reqs]
        resumed = self._seam.resumed_requests(cached)
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        more_blocks = {
            key: tuple(blocks[self._kv_group])
            for key, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if blocks
        }
        for key in [key for key in cached.req_ids if key in resumed]:
            ours = more_blocks.pop(key, ())
            new.append(NewRequest(key, starts.pop(key), ours, resumed=True))
        return Step(
            new=tuple(new),
            starts=starts,
            more_blocks=more_blocks,
            scheduled=scheduler_output.num_scheduled_tokens,
            order=self._seam.step_order(worker),
            copies=self._seam.block_copies(scheduler_output),
        )

    def _begin(self, request: Any) -> NewRequest:
        assert self._book is not None
        key, num_computed = request.req_id, request.num_computed_tokens
        blocks = tuple(request.block_ids[self._kv_group]) if request.block_ids else ()
        if key in self._book:
            # Model Runner V2 is sent a pre-empted request again as if it were new.
            return NewRequest(key, num_computed, blocks, resumed=True)
        request_id, prompt = self._seam.external_request_id(key), _prompt_tokens(request)
        options = read_options(request.sampling_params, len(prompt), self._settings.tokens)
        if not (self._recording and options.capture and self._is_sampled(request_id)):
            return NewRequest(key, num_computed, blocks, NOTHING)
        first = options.window.start
        self._recorder.begin(
            key, RequestFacts(request_id, prompt, options.tag, options.loss_spans, self._num_begun, first)
        )
        self._num_begun += 1
        return NewRequest(key, num_computed, blocks, options.window)

    def _is_sampled(self, request_id: str) -> bool:
        """Whether the request falls into the fraction to capture: the same answer for the same id, on every replica."""
        return xxhash.xxh64_intdigest(request_id.encode()) < self._settings.sample * 2**64

    def _finish_requests(self, finished: Any) -> None:
        if finished and not isinstance(finished, FinishedRequests):
            raise CaptureError("the engine process is not patched: finished requests came without their lengths")
        unknown = [key for key in finished if key not in finished.facts]
        if unknown:
            raise CaptureError(f"request {unknown[0]!r} finished and the engine did not note its length")
        for key in sorted(finished, key=lambda key: finished.facts[key].serial):
            self._finish(key, finished.facts[key])

    def _finish(self, key: str, fact: FinishedRequest) -> None:
        if fact.serial <= self._last_ended:
            return  # told again at the end; another request may have the id by now
        if self._book is not None and key in self._book:  # else aborted while it waited
            if self._book.is_captured(key):
                self._recorder.finish(key, self._book.find_rows(key, self._count_rows(key, fact)), fact.reason)
            self._book.forget(key)
        # Last, because a signal may raise SystemExit between any two lines and the request is then told again.
        self._last_ended = fact.serial

    def _count_rows(self, key: str, fact: FinishedRequest) -> int:
        """Positions of the record: the last token was sampled and not computed, and an abort ends it anywhere."""
        assert self._book is not None
        computed = fact.num_tokens - 1
        return min(computed, self._book.count_positions(key)) if fact.reason == "abort" else computed


def _prompt_tokens(request: Any) -> NDArray[np.int64]:
    """The prompt's token ids, int64 `[prompt tokens]`; -1 where the prompt is embeddings or an image's place."""
    if request.prompt_token_ids is None:
        return np.full(len(request.prompt_embeds), -1, dtype=np.int64)
    tokens = np.asarray(request.prompt_token_ids, dtype=np.int64)
    return np.full_like(tokens, -1) if request.mm_features else tokens


def _refuse_parallelism(config: Any, seam: Seam) -> None:
    """What is not captured is refused by name, before the weights are read."""
    sizes = {name: getattr(config.parallel_config, name, 1) for name in CONTEXT_PARALLEL_SIZES}
    refusals = [describe_context_parallelism(name, size) for name, size in sizes.items()]
    refusals.append(describe_sharded_stream(seam.sharding_option(config)))
    for refusal in filter(None, refusals):
        raise CaptureError(refusal)
    if config.speculative_config is not None and config.scheduler_config.async_scheduling:
        raise CaptureError(
            "speculative decoding with async scheduling: the scheduler's positions run ahead of what is accepted, and "
            "rows would be crossed; set --no-async-scheduling, or unset VLLM_OVERLAY_CAPTURE"
        )
    if config.kv_transfer_config is not None:
        raise CaptureError(
            "a KV connector fills blocks whose rows never passed by; unset kv_transfer_config to capture"
        )
