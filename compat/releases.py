"""The vLLM releases that are supported, and which seam serves each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_overlay.compat import (
    since_0_11_0,
    since_0_11_1,
    since_0_12_0,
    since_0_14_0,
    since_0_17_0,
    since_0_18_0,
    since_0_20_0,
    since_0_24_0,
    since_0_25_0,
    since_0_26_0,
    since_0_29_0,
    since_0_30_0,
    since_0_32_0,
    since_0_33_0,
)

POLICY_VARIABLE = "VLLM_OVERLAY_POLICY"
RELEASE_VARIABLE = "VLLM_OVERLAY_RELEASE"


class UnsupportedRelease(ImportError):
    """The installed vLLM is not a release that this overlay knows. An ImportError, so that `import vllm` fails."""


class Seam(Protocol):
    """What every seam module exports. Module names are strings so that reading them imports nothing."""

    ENGINE_CORE: str
    ENGINE_EXCEPTIONS: str
    ENGINE_PROCESSES: str
    ENVS: str
    EXECUTOR: str
    KV_CACHE_PLANNING: str
    KV_CACHE_UTILS: str
    LAUNCHER: str
    MODEL_INTERFACES: str
    MODEL_LOADER: str
    MULTIPROC_EXECUTOR: str
    PARALLEL_CONFIG: str
    PROMETHEUS: str
    RAY_EXECUTOR: str
    REQUEST: str
    SCHEDULER: str
    SCHEDULER_CONFIG: str
    SCHEDULER_OUTPUT: str
    SPECULATIVE_CONFIG: str
    STRUCTURED_OUTPUT_REQUEST: str
    UNIPROC_EXECUTOR: str
    VLLM_CONFIG: str
    WORKER: str
    WORKER_BASE: str
    SPECULATIVE_DECODING_ON_CPU: bool
    CAPTURED_RUNNERS: tuple[str, ...]
    # The name of a model's method in another release line, and its name in this one.
    RENAMED_MODEL_METHODS: Mapping[str, str]

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

    def resumed_requests(self, cached_requests: Any) -> Collection[str]:
        """The engine's ids of the requests that come back after a pre-emption."""
        ...

    def worker_place(self, num_hidden_layers: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """(rank in its tensor-parallel group, pipeline stage, [first, end) layers of each stage) of this worker."""
        ...

    def sharding_option(self, vllm_config: Any) -> str | None:
        """The option that makes tensor-parallel ranks hold parts of the residual stream; None if each holds all."""
        ...

    def full_attention_group(self, kv_cache_config: object) -> tuple[int, int] | None:
        """(index, block size) of the KV-cache group whose blocks hold whole prefixes; None if the model has none."""
        ...

    def settle_block_sizes(self, kv_cache_config: Any, vllm_config: Any) -> Mapping[str, int]:
        """The sizes that vLLM's engine builds a scheduler with, by parameter; `vllm_config` is settled as it does."""
        ...

    def settle_kv_cache_layout(self, vllm_config: Any, executor: Any, kv_cache_specs: Iterable[Any]) -> bool:
        """Settle the layout of KV caches, as vLLM's engine does before it plans them. False if there is nothing to."""
        ...

    def fed_layer_ids(self, asked: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
        """The layers of the target that an EAGLE-3 draft is fed, by our ids, whose configuration asks for these."""
        ...

    def block_copies(self, scheduler_output: object) -> Sequence[tuple[int, int]]:
        """KV blocks (source, destination) that the worker copies before this step."""
        ...


# Every release that is supported, and the seam module that serves it. One that moved nothing is a line here; one that
# moved something is a line and a module that says what.
RELEASES: dict[str, Seam] = {
    "0.11.0": since_0_11_0,
    "0.11.1": since_0_11_1,
    "0.12.0": since_0_12_0,
    "0.13.0": since_0_12_0,
    "0.14.1": since_0_14_0,
    "0.15.1": since_0_14_0,
    "0.16.0": since_0_14_0,
    "0.17.1": since_0_17_0,
    "0.18.1": since_0_18_0,
    "0.19.1": since_0_18_0,
    "0.20.2": since_0_20_0,
    "0.21.0": since_0_20_0,
    "0.22.1": since_0_20_0,
    "0.23.0": since_0_20_0,
    "0.24.0": since_0_24_0,
    "0.25.1": since_0_25_0,
    "0.26.0": since_0_26_0,
    "0.27.1": since_0_26_0,
    "0.28.0": since_0_26_0,
    "0.29.0": since_0_29_0,
    "0.30.0": since_0_30_0,
    "0.31.0": since_0_30_0,
    "0.32.0": since_0_32_0,
}
SUPPORTED: tuple[str, ...] = tuple(RELEASES)

# Read as text and never run, for there is no build for a CPU: tried under the policy `warn`, or when the user names it.
READ: dict[str, Seam] = {"0.33.0": since_0_33_0}


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

    `stands_for` (VLLM_OVERLAY_RELEASE) wins: a development build's version says nothing of the code in it. A point
    release that is not in the table is served as the one of its line that is. Under the policy `warn` a vLLM newer than
    the newest supported release is tried as the newest one that was read.

    Errors: UnsupportedRelease with the supported releases and the override's name.
    """
    if stands_for is not None:
        if stands_for not in RELEASES | READ:
            raise UnsupportedRelease(f"vllm-overlay: {RELEASE_VARIABLE}={stands_for!r} is not supported. {_list()}")
        return stands_for
    installed = base_version(version)
    line = [] if installed.is_prerelease else [r for r in SUPPORTED if Version(r).release[:2] == installed.release[:2]]
    if line:
        not_newer = [release for release in line if Version(release).release <= installed.release]
        return not_newer[-1] if not_newer else line[0]
    newest_read = list(READ)[-1]
    is_newer = installed > Version(SUPPORTED[-1]) and not installed.is_devrelease
    if policy == "warn" and is_newer:
        return newest_read
    hint = f"set {RELEASE_VARIABLE} to the release it stands for"
    if is_newer:
        hint += f", or {POLICY_VARIABLE}=warn to try it as {newest_read}"
    raise UnsupportedRelease(
        f"vllm-overlay: vLLM {version} is not a supported release; nothing was patched. {_list()}; {hint}"
    )


def seam_for(release: str) -> Seam:
    """The seam module that serves a release that is supported or was read."""
    return (RELEASES | READ)[release]


def is_needed(specifier: str, release: str) -> bool:
    """Whether a patch's PEP 440 specifier covers a release."""
    return SpecifierSet(specifier).contains(release, prereleases=True)


def is_newer(version: str) -> bool:
    """Whether an installed version is newer than the line of the newest supported release."""
    return base_version(version).release[:2] > Version(SUPPORTED[-1]).release[:2]


def is_same_release(version: str, release: str) -> bool:
    """Whether an installed version is this very release; local parts and post releases count as the same."""
    return base_version(version).release == Version(release).release


def _list() -> str:
    return f"Supported: {', '.join(SUPPORTED)}"
