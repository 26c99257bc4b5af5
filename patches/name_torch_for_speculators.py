"""speculators 0.3 can be imported beside transformers 5, which vLLM 0.24 and later require.

Why: its configurations are pydantic models and transformers configurations at once. In transformers 5 those are
dataclasses whose annotations name `torch`, which their module imports for type checkers only, so pydantic does not
find it and `import speculators` fails. What it does not change: the fields and what they accept; with transformers 4
the name is looked up and not needed.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.patch import Patch

MODELS = "speculators.utils.pydantic_utils:ReloadableBaseModel"


def build(original: Any) -> Any:
    def reload_with_torch(wrapped: Any, cls: Any, args: Any, kwargs: Any) -> None:
        import torch

        cls.model_rebuild(force=True, _types_namespace={"torch": torch})

    return wrapt.FunctionWrapper(original, reload_with_torch)


def verify() -> None:
    from pydantic import BaseModel
    from speculators.utils.pydantic_utils import ReloadableBaseModel

    if not issubclass(ReloadableBaseModel, BaseModel):
        raise RuntimeError("expected speculators' ReloadableBaseModel to be a pydantic model")


PATCH = Patch(
    name="name_torch_for_speculators",
    targets=(f"{MODELS}.reload_schema",),
    vllm=">=0.11",
    process="any",
    relies_on={},
    upstream="speculators 0.4 and later",
    remove_when="nobody runs speculators 0.3 any more",
    build=build,
    verify=verify,
    package="speculators==0.3.*",
)
