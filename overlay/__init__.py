"""vllm-overlay, laid over an installed and pinned vLLM.

What lives here: activation (`activation`), the patch record (`patch`) and its ledger (`ledger`), the settings, hidden
state capture (`capture/`), the store (`store/`), datasets (`dataset/`), EAGLE-3 training (`eagle3/`), the drivers of
vLLM's offline engine (`offline/`) and the command line (`cli/`). What may not: changes to vLLM's behaviour, which are
one file each in `patches/`, and comparisons of vLLM releases, which belong to `compat/`.

Importing this package imports neither torch nor vllm.
"""

if __name__ != "vllm_overlay":
    raise ImportError(f"this folder is the package vllm_overlay, not {__name__!r}: install the project and import that")
