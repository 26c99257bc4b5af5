"""placeholder"""

if __name__ != "vllm_overlay":
    raise ImportError(f"this folder is the package vllm_overlay, not {__name__!r}: install the project, then import it by that name")
