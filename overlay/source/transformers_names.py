"""Which causal language model transformers has for a type of model, read from its files as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

FILE = "transformers/models/auto/modeling_auto.py"

_TABLE = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b.*?^\)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"""\(\s*["'](\w[\w.-]*)["'],\s*["'](\w+)["']\s*,?\s*\)""")


def read_causal_names(site_packages: str) -> Mapping[str, str]:
    """Architectures by model type: `llama` is `LlamaForCausalLM`. Empty if transformers is not there or reads anew."""
    file = Path(site_packages) / FILE
    if not file.is_file():
        return {}
    table = _TABLE.search(file.read_text(encoding="utf-8"))
    return dict(_ROW.findall(table[0])) if table else {}
