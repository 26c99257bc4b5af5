"""Whether a patch fits a release, judged from what its targets look like there and nothing else."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vllm_overlay.compat import releases
from vllm_overlay.patch import Patch, Target
from vllm_overlay.source.definitions import Definition
from vllm_overlay.source.signatures import Parameter, list_parameters

LookUp = Callable[[str], Definition]

_STEP_FIELDS = ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens")

# patch: what it needs beside its targets and what it imports. Its `verify` asks for the same when it is applied.
VERIFIED: Mapping[str, tuple[str, ...]] = {
    "close_capture_at_exit": ("vllm.v1.engine.core:EngineCore.shutdown",),
    "close_capture_with_engine": ("vllm.v1.executor.abstract:Executor.collective_rpc",),
    "install_capture_worker": ("vllm.config.parallel:ParallelConfig.worker_extension_cls",),
    "leave_out_warm_up_steps": ("vllm.v1.worker.gpu_worker:Worker.execute_model",),
    "match_drafts_with_targets": tuple(
        f"vllm.config.speculative:SpeculativeConfig.{field}"
        for field in ("method", "model", "draft_model_config", "target_model_config")
    ),
    "note_finished_requests": (
        "vllm.v1.request:Request.num_tokens",
        "vllm.v1.request:Request.get_finished_reason",
    ),
    "record_steps": tuple(f"vllm.v1.core.sched.output:SchedulerOutput.{field}" for field in _STEP_FIELDS),
    "send_finished_requests": ("vllm.v1.core.sched.output:SchedulerOutput.finished_req_ids",),
    "tap_decoder_layers": ("vllm.v1.worker.gpu_worker:Worker.get_model",),
}


@dataclass(frozen=True)
class Fit:
    """How a patch fits a release. `definitions` and `relies_on` go by target; each misfit is one line for a person.

    `restored` are the targets that the patch makes, which must be absent.
    """

    patch: str
    state: Literal["fits", "would fail", "not needed"]
    definitions: Mapping[str, Definition] = field(default_factory=dict)
    relies_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    restored: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()


def list_targets(patch: Patch, release: str) -> list[Target]:
    """The targets inside vLLM; patches may have some in other packages. `release` is a supported one."""
    return [target for target in patch.resolve_targets(releases.seam_for(release)) if _is_of_vllm(target.module)]


def judge(
    patch: Patch, release: str, look_up: LookUp, look_up_known: Callable[[str], Definition | None] = lambda name: None
) -> Fit:
    """Check everything the patch needs. `look_up_known` is for a release that the patch fits, to compare calls with.

    `release` is a supported one. Errors: what the look-ups raise.
    """
    if not releases.is_needed(patch.vllm, release):
        return Fit(patch.name, "not needed")
    targets = list_targets(patch, release)
    definitions = {str(target): look_up(str(target)) for target in targets}
    misfits: list[str] = []
    for target in targets:
        if target.restore:
            misfits += _judge_restored(target, definitions[str(target)], look_up(name_owner(target)))
            continue
        misfits += _judge_target(target, definitions[str(target)])
        misfits += _compare_calls(target, look_up_known(str(target)), definitions[str(target)])
    misfits += filter(None, (_judge_presence(name, look_up(name)) for name in list_needed_names(patch)))
    state: Literal["would fail", "fits"] = "would fail" if misfits else "fits"
    parameters = {str(target): target.parameters for target in targets}
    restored = tuple(str(target) for target in targets if target.restore)
    return Fit(patch.name, state, definitions, parameters, restored, tuple(misfits))


def list_needed_names(patch: Patch) -> list[str]:
    """What a patch needs beside its targets: what its file imports from vLLM, and what `verify` asks for."""
    file = sys.modules[patch.build.__module__].__file__
    assert file is not None
    imported = _list_imports(ast.parse(Path(file).read_text(encoding="utf-8")))
    return sorted({*imported, *VERIFIED.get(patch.name, ())})


def _is_of_vllm(module: str) -> bool:
    return module.split(".")[0] == "vllm"


def _list_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_of_vllm(node.module):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def name_owner(target: Target) -> str:
    """The class or module that holds the binding."""
    outer = target.path.rpartition(".")[0]
    return f"{target.module}:{outer}" if outer else target.module


def _judge_restored(target: Target, found: Definition, owner: Definition) -> Iterator[str]:
    misfit = _judge_presence(name_owner(target), owner)
    if misfit:
        yield misfit
    if found.is_there:
        yield (
            f"expected no {target}, which the patch puts back, found {describe(found)}: vLLM has it again; leave this"
            " release out of the patch's `vllm` specifier"
        )


def _judge_target(target: Target, found: Definition) -> Iterator[str]:
    misfit = _judge_presence(str(target), found)
    if misfit:
        yield misfit
        return
    parameters = list_parameters(found.signature) if found.signature else ()
    names = [parameter.name for parameter in parameters]
    for name in target.parameters:
        if name not in names:
            yield f"expected {target} to take {name!r}, found {describe(found)}: {_advise_on_parameter(name, names)}"


def _judge_presence(name: str, found: Definition) -> str | None:
    if found.is_there:
        return None
    if found.inherited_from:
        what = f"it is inherited from {found.inherited_from} and not defined in the class itself"
        return f"expected {name}, found that {what}: patch it there, if all its classes are meant"
    if not found.elsewhere:
        return f"expected {name}, found nothing of that name in this release: find out what took its place"
    return (
        f"expected {name}, found none: it may have become {' or '.join(found.elsewhere[:3])}; see the seam in compat/"
    )


def _advise_on_parameter(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"was it renamed to {near[0]!r}?" if near else "find out what took its place"


def _compare_calls(target: Target, known: Definition | None, found: Definition) -> Iterator[str]:
    """What would make a wrapper that fits the known release do the wrong thing in this one."""
    if known is None or not (known.signature and found.signature and found.is_there):
        return
    before, now = list_parameters(known.signature), list_parameters(found.signature)
    for parameter in now:
        if parameter.is_required and parameter.name not in [one.name for one in before]:
            yield (
                f"expected {target} to be called as before, found a new required parameter {parameter.name!r} in"
                f" {describe(found)}: see that the patch passes it on, then record the release"
            )
    for name in target.parameters:
        old, new = _find_position(before, name), _find_position(now, name)
        if new is not None and old is not None and old != new:
            yield (
                f"expected {target} to take {name!r} as parameter {old}, found it as parameter {new} in"
                f" {describe(found)}: see how the patch finds it, then record the release"
            )


def _find_position(parameters: Sequence[Parameter], name: str) -> int | None:
    return next((index for index, one in enumerate(parameters) if one.name == name and one.kind == "positional"), None)


def describe(found: Definition) -> str:
    """What was found, with its place if it was read just now: `(self, request) at vllm/v1/request.py:12`."""
    if found.kind == "absent":
        return "nothing"
    place = f" at {found.place}" if found.place else ""
    return f"{found.signature or f'a {found.kind}'}{place}"
