"""A model's architecture made small and run once: `vllm-overlay check MODEL --rehearse`.

What lives here: a small config.json from a real one (`shrink`, and what it asks: `depth`, `widths`, `towers`), the
process that runs it with an end in time (`bounded`), and what that process does (`run`, `worker`, `reference`). What
may not: lines of the report (those are `check`'s), and torch, vllm or transformers in what `check` imports from here.
"""

from __future__ import annotations

if __name__ != "vllm_overlay.rehearsal":
    raise ImportError(f"this folder is the package vllm_overlay.rehearsal, not {__name__!r}")
