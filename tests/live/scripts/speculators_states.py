"""A user's script of speculators 0.3: it makes a `VllmHiddenStatesGenerator`, calls it and keeps what it returns.

usage: speculators_states.py PLAN.json; the plan holds `generator` (keyword arguments), `calls` (lists of prompts as
token ids) and `out` (a safetensors file: `<call>.<prompt>` [layers, tokens, hidden]).

The generator asks CUDA for the free memory. Where there is no GPU, that one answer is given here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    import torch
    from safetensors.torch import save_file
    from speculators.data_generation import VllmHiddenStatesGenerator

    if not torch.cuda.is_available():
        torch.cuda.mem_get_info = lambda device=None: (2**30, 2**30)
    plan = json.loads(Path(sys.argv[1]).read_text())
    generator = VllmHiddenStatesGenerator(**plan["generator"])
    states = {}
    for number, prompts in enumerate(plan["calls"]):
        for place, result in enumerate(generator.generate(prompts)):
            assert result["input_ids"].tolist() == prompts[place]
            states[f"{number}.{place}"] = torch.stack(result["hidden_states"])
    save_file(states, plan["out"])
