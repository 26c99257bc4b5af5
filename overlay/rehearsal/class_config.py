"""The process that says what a configuration's class makes of it:

    python -m vllm_overlay.rehearsal.class_config MODEL FILE trusted|not-trusted

MODEL is a folder with a config.json; what its class makes of the text model is written to FILE as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(words: Sequence[str]) -> int:
    """Errors: what vLLM and transformers raise for a model that they do not know."""
    from vllm.plugins import load_general_plugins
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    model, file, trust = words
    load_general_plugins()
    config = get_config(model, trust_remote_code=trust == "trusted")
    fields = get_hf_text_config(config).to_dict()
    Path(file).write_text(json.dumps(fields, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
