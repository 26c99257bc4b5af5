"""The supported vLLM releases, and where things live from each release on.

What lives here: `releases` (the table, the only place that compares vLLM versions) and one seam module per release
line in which something moved, `since_X`, read by `seam_for`. Each takes all names of the one before it and says what
moved, so all of them have the names of `Seam`. `packages` tells whether another package is there in the versions that
a patch is for. What may not live here: anything else of ours, and changes to vLLM, which are in `patches/`.
"""

if __name__ != "vllm_overlay.compat":
    raise ImportError(f"this folder is the package vllm_overlay.compat, not {__name__!r}: install the project first")
