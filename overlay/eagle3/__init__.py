"""EAGLE-3 draft heads: trained from a store, exported to a checkpoint that vLLM serves, measured by a greedy chain.

What lives here: the target's head (`target`), the draft vocabulary (`vocabulary`), the draft (`draft`, `attention`,
`initialisation`), the data (`data`, `batch`), the loss and the loop (`loss`, `training`, `run_folder`, `curve`), the
check of the data before the first step (`selftest`), the checkpoint for vLLM (`export`), whether vLLM would feed
it what it was trained on (`match`), and the measure of a draft (`acceptance`).

What may not: vLLM, the patches, the capture worker. Everything here runs where vLLM is not installed.
"""
