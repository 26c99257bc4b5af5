"""Hooks on a built model, beside the taps: is what was captured what the next layer receives, bit for bit?"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import xxhash

from vllm_overlay.capture.layers import bind, count_layers, find_decoder_layers, read_input, read_output
from vllm_overlay.capture.taps import Taps


class Watch:
    """What each layer receives and what follows the last one, compared with the buffer in every step."""

    def __init__(self, worker: Any, taps: Taps) -> None:
        config = worker.vllm_config.model_config
        self.faults: list[str] = []
        self.rows: set[str] = set()
        self._taps = taps
        self._hidden_size = int(config.get_hidden_size())
        self._layers = find_decoder_layers(worker.get_model(), count_layers(config.hf_text_config))
        self._received: dict[int, torch.Tensor] = {}
        self._carries_residual = read_output(self._layers[-1]).residual is not None
        self._is_after_last = False
        for module in worker.get_model().modules():
            module.register_forward_pre_hook(self._look_behind_last, with_kwargs=True)
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(self._make_note(index), with_kwargs=True)
        self._layers[-1].register_forward_hook(self._compare)
        worker.get_model().register_forward_hook(self._look_at_return)

    def _make_note(self, index: int) -> Any:
        stream = read_input(self._layers[index])

        def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                inspect.signature(layer.forward).bind(*args, **kwargs)
            except TypeError:
                # Such a call is the layer's to refuse, in its own words, right after this.
                return
            hidden, residual = bind(stream, args, kwargs)
            # A copy: kernels write into what they are given.
            self._received[index] = self._rows_of(hidden.clone() if residual is None else hidden + residual)

        return note

    def _compare(self, layer: Any, args: Any, output: Any) -> None:
        """Called behind the last layer, when the step's rows are all in the buffer."""
        self._is_after_last = True
        first = self._received[0]
        for index, stream in self._received.items():
            if not stream.equal(self._column(index, len(stream))):
                self._note_fault(f"layer id {index} is not what layer {index + 1} receives")
        rows = self._taps.buffer[: len(first)].float().cpu()  # [tokens, ids, hidden]
        self.rows |= {digest(row) for row in rows}

    def _look_behind_last(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_after_last:
            return
        wide = [self._rows_of(value) for value in (*args, *kwargs.values()) if self._is_wide(value)]
        if not wide:
            return
        self._is_after_last = False
        is_sum = self._carries_residual and len(wide) > 1
        self._compare_last(
            wide[0] + wide[1] if is_sum else wide[0], f"{type(module).__name__} receives behind the last layer"
        )

    def _look_at_return(self, model: Any, args: Any, output: Any) -> None:
        """A model that normalises with its logits returns what its last layer handed on."""
        if self._is_after_last:
            self._is_after_last = False
            self._compare_last(output, "the model returns")

    def _compare_last(self, stream: torch.Tensor, what: str) -> None:
        last = len(self._layers)
        if not stream.equal(self._column(last, len(stream))):
            self._note_fault(f"layer id {last} is not what {what}")

    def _note_fault(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)

    def _column(self, layer_id: int, count: int) -> torch.Tensor:
        """The captured states of a layer id, `[tokens, hidden]`."""
        return self._taps.buffer[:count, self._taps.layer_ids.index(layer_id)]

    def _rows_of(self, value: torch.Tensor) -> torch.Tensor:
        return value.reshape(-1, self._hidden_size)

    def _is_wide(self, value: Any) -> bool:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return is_float and value.ndim > 0 and value.shape[-1] == self._hidden_size


def digest(row: torch.Tensor) -> str:
    """Of one token's captured states, float32 `[ids, hidden]`."""
    return xxhash.xxh64_hexdigest(row.contiguous().numpy().tobytes())
