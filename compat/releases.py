"""The vLLM releases we have run on, and which seam serves each."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

# A release enters this table when the live tests have passed on it.
SUPPORTED: tuple[str, ...] = ("0.16.0", "0.24.0", "0.32.0")

# (first release, module): a release is served by the last row that is not newer than it.
SEAMS: tuple[tuple[str, str], ...] = (
    ("0.16.0", "vllm_overlay.compat.since_0_16_0"),
    ("0.24.0", "vllm_overlay.compat.since_0_24_0"),
    ("0.32.0", "vllm_overlay.compat.since_0_32_0"),
)

POLICY_VARIABLE = "VLLM_OVERLAY_POLICY"
RELEASE_VARIABLE = "VLLM_OVERLAY_RELEASE"


class UnsupportedRelease(ImportError):
    """The installed vLLM is not a release that this overlay knows. An ImportError, so that `import vllm` fails."""


class Seam(Protocol):
    """What every seam module exports. Module names are strings so that reading them imports nothing."""

    ENVS: str
    PARALLEL_CONFIG: str
    VLLM_CONFIG: str
    SCHEDULER: str
    ENGINE_CORE: str
    ENGINE_PROCESSES: str
    WORKER: str
    SPECULATIVE_DECODING_ON_CPU: bool
    CAPTURED_RUNNERS: tuple[str, ...]

    def external_request_id(self, internal_id: str) -> str:
        """The id that the caller gave, from the engine's own."""
        ...

    def runner_style(self, worker: object) -> str:
        """`V1` or `V2`: which model runner the worker has."""
        ...

    def step_order(self, worker: object) -> tuple[str, ...]:
        """The engine's ids of the requests of the step that was just computed, in the order of their rows."""
        ...

    def step_token_ids(self, worker: object) -> Any:
        """The token of every row of the step that was just computed, int32 `[max tokens]`, on the model's device."""
        ...

    def full_attention_group(self, kv_cache_config: object) -> tuple[int, int] | None:
        """(index, block size) of the KV-cache group whose blocks hold whole prefixes; None if the model has none."""
        ...

    def block_copies(self, scheduler_output: object) -> Sequence[tuple[int, int]]:
        """KV blocks (source, destination) that the worker copies before this step."""
        ...


def base_version(version: str) -> Version:
    """`0.16.0+cpu` -> `0.16.0`; post releases keep their number. Errors: UnsupportedRelease if it is no version."""
    try:
        return Version(Version(version).public)
    except InvalidVersion:
        raise UnsupportedRelease(
            f"vllm-overlay: vLLM calls itself {version!r}, which is no version. {_list()}"
        ) from None


def resolve_release(version: str, *, policy: str, stands_for: str | None) -> str:
    """The supported release that the installed vLLM is treated as.

    `stands_for` (VLLM_OVERLAY_RELEASE) wins: a development build's version says nothing of the code in it. Under the
    policy `warn` a vLLM newer than the newest supported release is tried as that release.

    Errors: UnsupportedRelease with the supported releases and the override's name.
    """
    if stands_for is not None:
        if stands_for not in SUPPORTED:
            raise UnsupportedRelease(f"vllm-overlay: {RELEASE_VARIABLE}={stands_for!r} is not supported. {_list()}")
        return stands_for
    installed = base_version(version)
    for release in SUPPORTED:
        if installed.release == Version(release).release and not installed.is_prerelease:
            return release
    newest = SUPPORTED[-1]
    if policy == "warn" and installed > Version(newest) and not installed.is_devrelease:
        return newest
    hint = f"set {RELEASE_VARIABLE} to the release it stands for"
    if installed > Version(newest) and not installed.is_devrelease:
        hint += f", or {POLICY_VARIABLE}=warn to try it as {newest}"
    raise UnsupportedRelease(
        f"vllm-overlay: vLLM {version} is not a supported release; nothing was patched. {_list()}; {hint}"
    )


def seam_for(release: str) -> Seam:
    """The seam module that serves a supported release."""
    name = [module for first, module in SEAMS if Version(first) <= Version(release)][-1]
    return cast(Seam, importlib.import_module(name))


def is_needed(specifier: str, release: str) -> bool:
    """Whether a patch's PEP 440 specifier covers a release."""
    return SpecifierSet(specifier).contains(release, prereleases=True)


def is_older(release: str, than: str) -> bool:
    """Whether one release comes before another."""
    return Version(release) < Version(than)


def _list() -> str:
    return f"Supported: {', '.join(SUPPORTED)}"
