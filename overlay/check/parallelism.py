"""Tensor parallelism: whether the model's heads can be divided so, and which rank captures."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_overlay.check.line import Line
from vllm_overlay.check.model import ModelFacts


def check_parallelism(size: int, facts: ModelFacts) -> Iterator[Line]:
    """The plan for this tensor parallel size."""
    subject = "tensor parallel size"
    if size < 1:
        yield Line(subject, "fails", "a whole number above 0", str(size), "give 1, or the number of devices")
        return
    heads, kv_heads = facts.num_attention_heads, facts.num_kv_heads
    expected = "a divisor of the attention heads"
    if heads is None:
        yield Line(subject, "ok", expected, f"{size}; config.json does not say how many heads there are")
    elif heads % size:
        near = max(one for one in range(1, size) if heads % one == 0)
        found = f"{size} ranks for {heads} attention heads"
        yield Line(subject, "fails", expected, found, f"vLLM refuses it: the nearest below is {near}")
        return
    else:
        yield Line(
            subject, "ok", expected, f"{size}: {heads // size} of {heads} attention heads a rank{_kv(size, kv_heads)}"
        )
    if size > 1:
        found = f"the first of {size} ranks captures; all hold the same residual stream"
        yield Line("capture on ranks", "ok", "one writer of each layer", found)


def _kv(size: int, kv_heads: int | None) -> str:
    if kv_heads is None:
        return ""
    if kv_heads < size:
        return f", each of {kv_heads} KV heads on {size // kv_heads} ranks"
    return f", {kv_heads // size} of {kv_heads} KV heads"
