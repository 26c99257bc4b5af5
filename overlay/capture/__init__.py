"""Capture of hidden states inside a vLLM worker.

What lives here: the taps in the decoder layers (`taps`), the accounting of rows (`rows`), the way of rows to the host
(`transfer`) and into the store (`recorder`), the session that owns them (`session`), the worker extension through
which vLLM reaches it (`extension`, `composed`), and what the engine process adds (`finished`). What may not: changes
to vLLM (those are in `patches/`), training, and anything that re-writes a model's forward.
"""
