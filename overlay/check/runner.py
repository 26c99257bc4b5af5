"""Which model runner an engine would take, V1 or V2, as far as the files and config.json say, and what follows."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from vllm_overlay.capture.limits import describe_runner
from vllm_overlay.check.installation import Installation
from vllm_overlay.check.line import Line
from vllm_overlay.check.model import ModelFacts
from vllm_overlay.compat.releases import seam_for

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

_CONFIG = "vllm.config.vllm"
_DEFAULT_ARCHITECTURES = "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
_ON, _OFF = ("1", "true"), ("0", "false")


def check_runner(facts: ModelFacts, installation: Installation, environ: Mapping[str, str]) -> Line:
    """The runner, why it is that one, and whether its steps are captured."""
    subject = "model runner"
    captured = seam_for(installation.release).CAPTURED_RUNNERS
    expected = f"{' or '.join(captured)}, whose steps are captured on this release"
    runner, why = choose_runner(facts, installation, environ)
    refusal = describe_runner(runner, captured, installation.version)
    if refusal:
        return Line(subject, "fails", expected, f"{runner}: {why}", refusal)
    return Line(subject, "ok", expected, f"{runner}: {why}")


def choose_runner(facts: ModelFacts, installation: Installation, environ: Mapping[str, str]) -> tuple[str, str]:
    """(`V1` or `V2`, the reason). Where options could change it, the reason says so."""
    files = installation.source.files
    if VARIABLE not in files.get("vllm/envs.py", ""):
        return "V1", "this release has no other"
    word = environ.get(VARIABLE, "").strip().lower()
    if word in _ON:
        return "V2", f"{VARIABLE}={word}"
    if word in _OFF:
        return "V1", f"{VARIABLE}={word}"
    text = files.get("vllm/config/vllm.py", "")
    if "def use_v2_model_runner" not in text:
        return "V1", f"this release's default; {VARIABLE}=1 would change it"
    if installation.platform == "cpu":
        return "V1", "V2 requires Triton, which an installation for CPUs is without"
    default = _read_default_architectures(installation)
    if default is not None and not default & set(facts.architectures):
        takes_dense = re.search(r"def _is_default_v2_model_runner_model.*?\n    @", text, re.DOTALL)
        if takes_dense is None or "is_moe" not in takes_dense[0] or facts.has_experts:
            return "V1", f"{facts.architectures[0]} is not among those that this release runs with V2 by default"
    return (
        "V2",
        "this release's default for the model; V1 where a feature is on that V2 does not support, or Triton lacks",
    )


def _read_default_architectures(installation: Installation) -> set[str] | None:
    """The architectures that run with V2 by default; None where all do."""
    for statement in installation.definitions.read_module(_CONFIG):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == _DEFAULT_ARCHITECTURES:
            return {str(node.value) for node in ast.walk(statement.value) if isinstance(node, ast.Constant)}
    return None
