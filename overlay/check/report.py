"""The whole report on a model, and how it is shown."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.check.architecture import check_architecture, find_served
from vllm_overlay.check.caching import check_caching
from vllm_overlay.check.environment import check_environment
from vllm_overlay.check.installation import Installation, check_installation, read_installation, settle
from vllm_overlay.check.layers import (
    check_decoder_layers,
    check_deepseek,
    check_first_layer,
    check_layer_ids,
    check_streams,
)
from vllm_overlay.check.line import Line
from vllm_overlay.check.model import ModelFacts, check_model, read_model
from vllm_overlay.check.parallelism import check_parallelism
from vllm_overlay.check.patch_fits import check_patches
from vllm_overlay.check.rehearsal_options import RehearsalOptions
from vllm_overlay.check.runner import check_runner
from vllm_overlay.check.space import check_space
from vllm_overlay.compat.releases import UnsupportedRelease
from vllm_overlay.model_shape import ConfigError
from vllm_overlay.settings import Settings, SettingsError, read_settings
from vllm_overlay.source.vllm_source import SourceError

_WIDTH = 118


@dataclass(frozen=True)
class Plan:
    """What is asked about: a model folder or its config.json, and how it is to be run.

    `layers` is None for those of the settings; `num_tokens` are those of the dataset that the disk must hold;
    `rehearsal` is None if the model is not to be rehearsed.
    """

    model: Path
    layers: str | None = None
    tensor_parallel_size: int = 1
    num_tokens: int = 1_000_000
    rehearsal: RehearsalOptions | None = None


@dataclass(frozen=True)
class Report:
    """The lines, in the order in which a run meets them."""

    lines: tuple[Line, ...]

    @property
    def failing(self) -> list[Line]:
        return [line for line in self.lines if line.verdict == "fails"]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"would_fail": bool(self.failing), "lines": [dataclasses.asdict(line) for line in self.lines]}


def check(plan: Plan, environ: Mapping[str, str] = os.environ) -> Report:
    """Look at the plan's model and at the installed vLLM.

    What cannot be looked at because of a line that fails is left out: nothing is said twice.
    """
    lines: list[Line] = []
    settings = _read_settings(lines, environ)
    facts = _read_model(lines, plan.model)
    installation = _read_installation(lines, settings) if settings else None
    ids: tuple[int, ...] = ()
    if facts is not None:
        lines += check_model(facts)
        layers = settings.layers if settings and plan.layers is None else plan.layers
        line, ids = check_layer_ids("eagle3" if layers is None else layers, facts)
        lines.append(line)
        lines += check_streams(facts)
        lines += check_parallelism(plan.tensor_parallel_size, facts)
    if ids and facts is not None:
        capture, dtype = (settings.capture, settings.dtype) if settings else (None, "auto")
        lines += check_space(facts, len(ids), plan.num_tokens, capture, dtype)
    if settings is not None:
        lines += check_environment(settings, environ)
    if installation is not None and settings is not None:
        lines += check_installation(installation, settings)
        lines += _check_files(installation, facts, ids, environ)
    if plan.rehearsal is not None:
        lines += _rehearse(lines, plan, facts, ids, installation)
    return Report(tuple(lines))


def write_report(report: Report) -> Iterator[str]:
    """The report for a person: verdict and subject, and under each other what was expected, found, and to be done."""
    width = max(len(line.subject) for line in report.lines)
    for line in report.lines:
        head = f"{line.verdict:7}  {line.subject:{width}}  "
        parts = [line.found] if line.verdict == "ok" else [f"expected {line.expected}", f"found {line.found}"]
        if line.advice:
            parts.append(f"-> {line.advice}")
        for part in parts:
            yield from textwrap.wrap(
                part,
                _WIDTH,
                initial_indent=head,
                subsequent_indent=" " * (len(head) + 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
            head = " " * len(head)
        yield from textwrap.indent(line.details, " " * (len(head) + 2)).splitlines()


def describe_failure(line: Line) -> str:
    """A line that fails, in one line."""
    advice = f"; {line.advice}" if line.advice else ""
    return f"{line.subject}: expected {line.expected}, found {line.found}{advice}"


def _read_settings(lines: list[Line], environ: Mapping[str, str]) -> Settings | None:
    try:
        return read_settings(environ)
    except SettingsError as error:
        lines.append(
            Line("settings", "fails", "valid VLLM_OVERLAY_* variables", str(error), "set it right, or unset it")
        )
        return None


def _read_model(lines: list[Line], model: Path) -> ModelFacts | None:
    try:
        return read_model(model)
    except ConfigError as error:
        lines.append(Line("model", "fails", "a config.json with architectures and sizes", str(error)))
        return None


def _read_installation(lines: list[Line], settings: Settings) -> Installation | None:
    try:
        return settle(read_installation(), settings)
    except (SourceError, UnsupportedRelease) as error:
        reason = str(error).removeprefix("vllm-overlay: ")
        lines.append(Line("vLLM", "fails", "a supported release of vLLM", reason))
        return None


def _rehearse(
    lines: Sequence[Line],
    plan: Plan,
    facts: ModelFacts | None,
    ids: Sequence[int],
    installation: Installation | None,
) -> Iterator[Line]:
    from vllm_overlay.check.rehearsal import check_rehearsal

    is_failing = any(line.verdict == "fails" for line in lines)
    if is_failing or facts is None or installation is None or plan.rehearsal is None:
        yield Line(
            "rehearsal", "warning", "nothing that fails by reading alone", "not run", "set right what fails above"
        )
        return
    yield from check_rehearsal(facts, ids, plan.tensor_parallel_size, installation, plan.rehearsal)


def _check_files(
    installation: Installation, facts: ModelFacts | None, ids: Sequence[int], environ: Mapping[str, str]
) -> list[Line]:
    """What vLLM's files say of the model and of our patches."""
    lines: list[Line] = []
    try:
        if facts is not None:
            lines += _check_served(installation, facts, ids)
            lines.append(check_runner(facts, installation, environ))
        lines += check_caching(installation)
        lines += check_patches(installation)
    except SourceError as error:
        lines.append(Line("vLLM", "fails", "files that can be read", str(error), "reinstall vLLM"))
    return lines


def _check_served(installation: Installation, facts: ModelFacts, ids: Sequence[int]) -> Iterator[Line]:
    served = find_served(facts, installation)
    if isinstance(served, Line):
        yield served
        return
    yield from check_architecture(served, facts, installation)
    yield from check_decoder_layers(served)
    yield from check_first_layer(served, ids)
    yield from check_deepseek(served, facts)
