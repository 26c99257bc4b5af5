"""What of the overlay stands in this process's vLLM: read from the modules that are loaded, with nothing of ours."""

from __future__ import annotations

import sys
import types
from typing import Any

# wrapt's C types call their module "builtins", and a proxy lies about its class: type() does not.
WRAPPERS = ("FunctionWrapper", "BoundFunctionWrapper", "ObjectProxy", "CallableObjectProxy")


def find_traces() -> list[str]:
    """Every `module:Class.attribute` of vLLM that is the overlay's."""
    found: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "vllm" or not isinstance(module, types.ModuleType):
            continue
        for owner in (module, *(value for value in vars(module).values() if isinstance(value, type))):
            where = f"{name}:{owner.__qualname__}." if isinstance(owner, type) else f"{name}:"
            found.update(where + attribute for attribute, value in list(vars(owner).items()) if is_ours(value))
    return sorted(found)


def is_ours(value: Any) -> bool:
    """Whether a raw attribute, as it stands in its owner's dict, is a wrapper or was defined in the overlay."""
    kind = type(value)
    if kind.__name__ in WRAPPERS:
        return True
    inner = value.__func__ if kind in (staticmethod, classmethod) else value.fget if kind is property else value
    definer = inner if isinstance(inner, (type, types.FunctionType)) else type(inner)
    return str(definer.__module__).split(".")[0] == "vllm_overlay"
