"""placeholder"""

if __name__ != "vllm_overlay.patches":
    raise ImportError(f"this folder is the package vllm_overlay.patches, not {__name__!r}: install the project, then import it by that name")
