"""Conversations as token ids with a loss mask: what a capture runs through the target.

Here live the reading of chat files, the loss mask, and the dataset folder. Not here: anything that runs a model, and
anything of vLLM (that is `vllm_overlay.offline`).
"""

from __future__ import annotations

from vllm_overlay.dataset.dataset import Dataset, DatasetItem, write_dataset

__all__ = ["Dataset", "DatasetItem", "write_dataset"]

if __name__ != "vllm_overlay.dataset":
    raise ImportError(f"this folder is the package vllm_overlay.dataset, not {__name__!r}")
