"""The rehearsal's process ends in time, with what it started, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.unit.check.conftest import LLAMA
from vllm_overlay.errors import OverlayError
from vllm_overlay.rehearsal import bounded
from vllm_overlay.rehearsal.plan import Outcome, RehearsalPlan
from vllm_overlay.rehearsal.shrink import shrink

PLAN = RehearsalPlan("float32", 1, True, False, True, ())
# In place of vLLM: a process that has started another one.
HANGS = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])"
)


def replace_python(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Have the rehearsal run this program, which gets the same words."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setattr(bounded.sys, "executable", str(program))


def run(seconds: float = 60.0, code: Path | None = None) -> Outcome:
    return bounded.run_bounded(shrink(LLAMA), PLAN, (1, 2), seconds, code)


def wait_for(file: Path, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < until, file
        time.sleep(0.05)


def list_marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def test_a_process_that_hangs_is_ended_with_what_it_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = f"mark-of-{tmp_path.name}"
    text = HANGS.format(mark=mark)
    replace_python(monkeypatch, folder, f"{text}\nprint('I hang', flush=True)\ntime.sleep(600)")
    began = time.monotonic()
    outcome = run(seconds=3.0)
    assert time.monotonic() - began < 20.0
    assert (outcome.verdict, outcome.reason, outcome.timed_out) == ("died", "no end in time", True)
    assert outcome.details == "I hang"
    assert list_marked(mark) == []
    assert [one.name for one in folder.iterdir()] == ["python"]
    # The bar, which a log keeps each time that it is drawn.
    assert 1 <= capsys.readouterr().err.count("of at most") <= 2


def test_a_process_that_outlives_its_killing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that waits for a device."""
    monkeypatch.setattr(bounded, "_KILL_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(bounded.os, "killpg", lambda pid, number: None)
    try:
        with pytest.raises(OverlayError, match=f"processes {process.pid} of the rehearsal do not end"):
            bounded._end_all(process)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_ends_without_a_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(monkeypatch, folder, "import os, signal; print('last words', flush=True); os.kill(os.getpid(), 11)")
    outcome = run()
    assert (outcome.verdict, outcome.reason) == ("died", "the process ended with status -11")
    assert (outcome.stage, outcome.details) == ("starting", "last words")
    assert [one.name for one in folder.iterdir()] == ["python"]


# A rehearsal with a worker that writes into the folder all the time.
WORKER = """
import os, sys
while True:
    os.makedirs(sys.argv[1], exist_ok=True)
    open(sys.argv[1] + "/rows", "w").close()
"""
WRITES = f"""
import subprocess, sys
from pathlib import Path
from vllm_overlay.rehearsal.run import end_with_caller
subprocess.Popen([sys.executable, "-c", {WORKER!r}, sys.argv[2]])
end_with_caller(int(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_caller_that_is_killed_leaves_nothing(folder: Path) -> None:
    scratch = folder / "scratch"
    ours, theirs = os.pipe()
    command = [sys.executable, "-c", WRITES, str(ours), str(scratch)]
    process = subprocess.Popen(command, pass_fds=[ours], start_new_session=True)
    os.close(ours)
    wait_for(scratch / "rows")
    assert process.poll() is None
    os.close(theirs)
    assert process.wait(60) == -signal.SIGKILL
    assert not scratch.exists()


def test_what_the_process_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OVERLAY_SAMPLE", "0.5")
    monkeypatch.setenv("VLLM_OVERLAY_POLICY", "warn")
    told = """
import json, os, sys
folder = sys.argv[3]
facts = {name: os.environ.get(name) for name in ("VLLM_OVERLAY", "VLLM_OVERLAY_LAYERS", "VLLM_OVERLAY_SAMPLE",
         "VLLM_OVERLAY_POLICY", "VLLM_OVERLAY_CAPTURE")}
facts["layers"] = json.load(open(folder + "/model/config.json"))["num_hidden_layers"]
inside = (facts.pop("VLLM_OVERLAY_CAPTURE"), os.environ["HF_MODULES_CACHE"])
facts["inside"] = all(one.startswith(folder) for one in inside)
json.dump({"verdict": "equal", "reason": json.dumps(facts)}, open(folder + "/outcome.json", "w"))
"""
    replace_python(monkeypatch, folder, told)
    assert json.loads(run().reason) == {
        "VLLM_OVERLAY": "1",
        "VLLM_OVERLAY_LAYERS": "1,2",
        "VLLM_OVERLAY_SAMPLE": None,
        "VLLM_OVERLAY_POLICY": "warn",
        "layers": 4,
        "inside": True,
    }


def test_weights_of_transformers_that_do_not_load_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = """
import json, sys
folder = sys.argv[3]
if json.load(open(folder + "/plan.json"))["from_transformers"]:
    outcome = {"verdict": "died", "reason": "KeyError: 'odd.weight'", "details": "whole", "in_weights": True}
else:
    outcome = {"verdict": "consistent", "reason": "vLLM's own random weights"}
json.dump(outcome, open(folder + "/outcome.json", "w"))
"""
    replace_python(monkeypatch, folder, answers)
    outcome = run()
    assert (outcome.verdict, outcome.reason) == ("consistent", "vLLM's own random weights")
    assert (outcome.weights_failed, outcome.details) == ("KeyError: 'odd.weight'", "whole")


def test_the_models_own_files_are_beside_its_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = folder / "code"
    (code / "folder.py").mkdir(parents=True)
    (code / "modeling.py").write_text("")
    answers = """
import json, os, sys
names = ",".join(sorted(os.listdir(sys.argv[3] + "/model")))
json.dump({"verdict": "equal", "reason": names}, open(sys.argv[3] + "/outcome.json", "w"))
"""
    replace_python(monkeypatch, folder, answers)
    assert run(code=code).reason == "config.json,modeling.py"


def test_of_two_deaths_both_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = """
import json, sys
folder = sys.argv[3]
if not json.load(open(folder + "/plan.json"))["from_transformers"]:
    sys.exit(3)
outcome = {"verdict": "died", "reason": "KeyError: 'odd.weight'", "in_weights": True}
json.dump(outcome, open(folder + "/outcome.json", "w"))
"""
    replace_python(monkeypatch, folder, answers)
    outcome = run()
    assert (outcome.verdict, outcome.reason) == ("died", "the process ended with status 3")
    assert outcome.weights_failed == "KeyError: 'odd.weight'"
