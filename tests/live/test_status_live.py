"""`vllm-overlay status` on a real process tree, and a vLLM without the variable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live.runs import run_python
from tests.tiny_models import write_tiny_llama
from vllm_overlay.store import Store

pytestmark = pytest.mark.live

SCAN = """
import importlib, sys, types
for name in ("vllm", "vllm.config", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"):
    importlib.import_module(name)
ours = []
for name, module in list(sys.modules.items()):
    if not name.startswith("vllm.") or not isinstance(module, types.ModuleType):
        continue
    owners = [module, *(v for v in vars(module).values() if isinstance(v, type))]
    for owner in owners:
        for attribute, value in list(vars(owner).items()):
            # wrapt's C types call their module "builtins" and a proxy lies about its class: type() does not.
            if type(value).__name__ in ("FunctionWrapper", "KnownVariables"):
                ours.append(f"{name}:{getattr(owner, '__qualname__', '')}.{attribute}")
print(sorted(set(ours)))
print([name for name in sys.modules if name.startswith("vllm_overlay")])
"""


# What a forked child finds: how many of our wrappers lie around a function, and the state of every patch.
FORK = """
import json, multiprocessing, os
from vllm_overlay import activation
import vllm
from vllm.config import ParallelConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker

def count_wrappers(owner, name):
    found, depth = vars(owner)[name], 0
    while hasattr(found, "__wrapped__"):
        found, depth = found.__wrapped__, depth + type(found).__name__.endswith("FunctionWrapper")
    return depth

def describe():
    targets = ((ParallelConfig, "__post_init__"), (EngineCore, "shutdown"), (Worker, "load_model"))
    entries = activation.describe_process()["entries"]
    print(json.dumps({
        "pid": os.getpid(),
        "wrappers": {f"{owner.__name__}.{name}": count_wrappers(owner, name) for owner, name in targets},
        "states": {name: entry["state"] for name, entry in entries.items()},
    }), flush=True)

def describe_again():
    activation.activate()
    describe()

describe()
child = multiprocessing.get_context("fork").Process(target=describe_again)
child.start()
child.join()
assert child.exitcode == 0
"""

# vLLM would give each rank a NUMA node of its own, and a small machine has one.
BOUND_TO_CORES: dict[int, dict[str, str]] = {1: {}, 2: {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_process_of_an_engine_is_patched(ranks: int, tmp_path: Path) -> None:
    """CASES 35. The CPU platform starts every process by spawn, whatever it is told; fork is the test below."""
    model = write_tiny_llama(tmp_path / "model", layers=2)
    done = run_python(
        ["-m", "vllm_overlay.cli", "status", "--json", "--engine", str(model), "--", "--dtype", "float32",
         "--enforce-eager", "--max-model-len", "128", "--tensor-parallel-size", str(ranks)], BOUND_TO_CORES[ranks]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["problems"] == []
    roles = [role for process in report["processes"] for role in process["roles"]]
    assert {"front end", "engine", "worker"} <= set(roles)
    assert roles.count("worker") == ranks
    for process in report["processes"]:
        for entry in process["entries"].values():
            if entry["process"] in process["roles"]:
                unneeded = entry["state"] == "not needed here" and "is outside" in entry["reason"]
                assert entry["state"] == "applied" or unneeded, (process["roles"], entry)


def test_a_forked_process_is_patched_once(tmp_path: Path) -> None:
    """CASES 35, fork: what the parent patched holds in the child, and activating there again changes nothing."""
    done = run_python(["-c", FORK], {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store")})
    assert done.returncode == 0, done.stderr[-4000:]
    parent, child = map(json.loads, done.stdout.splitlines()[-2:])
    assert parent["pid"] != child["pid"]
    assert parent["wrappers"] == child["wrappers"]
    assert all(depth == 1 for depth in child["wrappers"].values()), child["wrappers"]
    assert parent["states"] == child["states"]
    assert set(child["states"].values()) <= {"applied", "not needed here", "waiting for import"}


# A tool that wraps what we wrap, after us, and patches applied once more on top of both; then a user's generate.
ANOTHER_TOOL = """
import sys
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_overlay import activation

if __name__ == "__main__":
    steps = []
    ours = Scheduler.schedule
    Scheduler.schedule = lambda scheduler, *args, **kwargs: steps.append(1) or ours(scheduler, *args, **kwargs)
    activation.activate()
    llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    print("steps", len(steps))
"""


def test_another_tool_wraps_the_same_function(tmp_path: Path) -> None:
    """CASES 36, in the process of the caller: both see every step, and the record is whole."""
    model = write_tiny_llama(tmp_path / "model", layers=2)
    script = tmp_path / "script.py"
    script.write_text(ANOTHER_TOOL)
    done = run_python(
        [str(script), str(model)],
        {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"), "VLLM_OVERLAY_LAYERS": "all",
         "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (steps,) = [line for line in done.stdout.splitlines() if line.startswith("steps ")]
    assert int(steps.split()[1]) >= 4
    with Store.open(tmp_path / "store") as store:
        assert [(record.complete, len(record.token_ids)) for record in store] == [(True, 6)]


def test_a_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """CASES 38, on the files of this release: whatever else fits, the version decides, and nothing is patched."""
    code = (
        "import sys, types\n"
        "sys.modules['vllm._version'] = types.SimpleNamespace(__version__='9.9.9', __version_tuple__=(9, 9, 9))\n"
        "try:\n    import vllm\nexcept ImportError as error:\n    print(error)\n"
        "print([name for name in sys.modules if name.startswith('vllm.')])"
    )
    done = run_python(["-c", code], {"VLLM_OVERLAY": "1"})
    refusal, left = done.stdout.splitlines()[-2:]
    assert "vLLM 9.9.9 is not a supported release; nothing was patched. Supported: 0.11.0," in refusal
    assert "VLLM_OVERLAY_RELEASE" in refusal
    assert "vllm.v1.engine.core" not in left


def test_plug_ins_that_leave_us_out_are_said(tmp_path: Path) -> None:
    """CASES 39: the start-up line has patched all the same."""
    code = "import vllm; from vllm.config import ParallelConfig; print(ParallelConfig().worker_extension_cls)"
    done = run_python(
        ["-c", code],
        {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"), "VLLM_PLUGINS": "other"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "VLLM_PLUGINS='other' leaves out 'vllm_overlay'" in done.stderr
    assert done.stdout.splitlines()[-1].endswith("CaptureExtension")


def test_without_the_variable_vllm_is_stock() -> None:
    stock = run_python(["-c", SCAN], {})
    assert stock.returncode == 0, stock.stderr[-2000:]
    assert stock.stdout.splitlines()[-2:] == ["[]", "[]"]


def test_with_the_variable_the_same_scan_finds_our_patches(tmp_path: Path) -> None:
    """So that the scan above is one that can fail."""
    patched = run_python(["-c", SCAN], {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store")})
    found = patched.stdout.splitlines()[-2]
    for target in ("environment_variables", "ParallelConfig.__post_init__", "EngineCore.shutdown", "Worker.load_model"):
        assert target in found
    assert not (tmp_path / "store").exists()
