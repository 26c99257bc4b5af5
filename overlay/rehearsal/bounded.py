"""The rehearsal's process: started with a folder of its own, ended in time, and nothing left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_overlay.errors import OverlayError
from vllm_overlay.progress import make_bar
from vllm_overlay.rehearsal.model_folder import write_model_folder
from vllm_overlay.rehearsal.plan import (
    FOLDER_VARIABLE,
    LOG,
    MODEL,
    STORE,
    Outcome,
    RehearsalPlan,
    read_outcome,
    read_stage,
)
from vllm_overlay.rehearsal.shrink import Small
from vllm_overlay.settings import PREFIX, SWITCH

_TICK_S = 0.25
# A killed process ends at once, unless it waits for a device or a network file system.
_KILL_S = 10.0
_LOG_LINES = 40
# The user's own choices for a real run, which the rehearsal makes itself.
_KEPT_SETTINGS = (f"{PREFIX}POLICY", f"{PREFIX}RELEASE")


def run_bounded(
    small: Small, plan: RehearsalPlan, layer_ids: Sequence[int], seconds: float, code: Path | None
) -> Outcome:
    """Rehearse in a process of its own, ended with all that it started after so many seconds.

    `code` is a folder whose Python files belong to the model; None if none may be run. Errors: OSError where the
    temporary folder takes no files; OverlayError where a process outlives being killed.
    """
    until = time.monotonic() + seconds
    outcome = _run_once(small, plan, layer_ids, until, code)
    if outcome.verdict != "died" or not outcome.in_weights or not plan.from_transformers:
        return outcome
    # The published weights may be named otherwise than transformers names them: the rest is seen with others.
    again = _run_once(small, replace(plan, from_transformers=False), layer_ids, until, code)
    return replace(again, details=again.details or outcome.details, weights_failed=outcome.reason)


def _run_once(small: Small, plan: RehearsalPlan, layer_ids: Sequence[int], until: float, code: Path | None) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-rehearsal-") as name:
        folder = Path(name)
        write_model_folder(folder / MODEL, small.config, code)
        plan.write(folder)
        # Nothing is written to it: the process reads its end, which comes however this one ends.
        ours, theirs = os.pipe()
        with Path(folder, LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_overlay.rehearsal.run", str(folder), str(ours)],
                pass_fds=[ours],
                env=_make_environment(os.environ, folder, plan, layer_ids),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                status = _wait(process, folder, until)
            finally:
                _end_all(process)
                os.close(ours)
                os.close(theirs)
        return _read(folder, status)


def _wait(process: subprocess.Popen[bytes], folder: Path, until: float) -> int | None:
    """The exit status, or None when the time is over."""
    began = time.monotonic()
    total = max(1, round(until - began))
    form = "{desc}: {n:.0f} of at most {total} s {bar}"
    with make_bar(total=total, unit="s", leave=False, bar_format=form) as bar:
        while (status := process.poll()) is None and time.monotonic() < until:
            bar.set_description_str(f"rehearsal, {read_stage(folder)}", refresh=False)
            bar.update(time.monotonic() - began - bar.n)
            time.sleep(_TICK_S)
    return status


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it lives, and whatever it has started: all are of its session, and most of its group."""
    import psutil  # vLLM requires it

    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    _, alive = psutil.wait_procs(started, timeout=_KILL_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
    left = [one.pid for one in alive] + ([process.pid] if process.returncode is None else [])
    if left:
        pids = ", ".join(map(str, left))
        raise OverlayError(f"processes {pids} of the rehearsal do not end though they were killed: look after them")


def _read(folder: Path, status: int | None) -> Outcome:
    outcome = read_outcome(folder)
    if outcome is not None:
        return outcome
    lines = Path(folder, LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    reason = "no end in time" if status is None else f"the process ended with status {status}"
    return Outcome("died", reason, "\n".join(lines[-_LOG_LINES:]), read_stage(folder), timed_out=status is None)


def _make_environment(
    environ: Mapping[str, str], folder: Path, plan: RehearsalPlan, layer_ids: Sequence[int]
) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in _KEPT_SETTINGS}
    ours = {
        SWITCH: "1",
        f"{PREFIX}CAPTURE": str(folder / STORE),
        f"{PREFIX}LAYERS": ",".join(map(str, layer_ids)),
        FOLDER_VARIABLE: str(folder),
        # Workers in processes of their own, whose imports are vLLM's own: the engine's, or one for each rank.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if plan.tensor_parallel_size == 1 else "0",
        # Threads of torch do not survive a fork; and vLLM 0.32 on a CPU dies where numba, which Kimi-K2.5's processor
        # imports, is in the process before the worker (triton_utils/dispatcher.py reads the attributes of its parts).
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Where transformers copies a model's own Python files, which stay and may be taken for another model's.
        "HF_MODULES_CACHE": str(folder / "modules"),
    }
    if plan.is_cpu:
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1"}
        if plan.tensor_parallel_size > 1:
            # Left to itself, vLLM wants a NUMA node for each rank.
            cpus = sorted(os.sched_getaffinity(0))
            ours["VLLM_CPU_OMP_THREADS_BIND"] = "|".join((str(cpus[0]), str(cpus[-1])))
    return kept | ours
