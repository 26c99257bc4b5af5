"""What runs a target offline, through vLLM's own `LLM`: starting and stopping the engine, generation, capture.

Not here: what runs inside vLLM's processes (`capture`, `patches`), and anything that trains (`eagle3`).
"""

from __future__ import annotations

if __name__ != "vllm_overlay.offline":
    raise ImportError(f"this folder is the package vllm_overlay.offline, not {__name__!r}")
