"""`vllm-overlay check`: what will happen with a model on the installed vLLM, said before anything is loaded.

What lives here: one file a subject, each with a function that looks and returns lines (`line`), and the report that
puts them together (`report`). What may not: importing torch, vllm or transformers, reading vLLM's files (that is
`source`'s), and rules that the run itself applies: those are asked where the run asks them.
"""
