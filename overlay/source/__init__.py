"""vLLM's Python files read as text.

What lives here: the files of a vLLM release, installed or in a folder (`vllm_source`), what a name in them is
(`definitions`, from `bindings` and `signatures`), which class serves an architecture (`registry`) and what its decoder
layers look like (`classes`, `decoder`), and whether a patch fits (`fit`). What may not: importing vLLM or torch, and
verdicts on a model or an environment, which are `check`'s.
"""
