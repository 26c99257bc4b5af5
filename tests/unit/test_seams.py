"""Every seam module exports the same names, and what they say of this environment's vLLM holds."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_overlay import compat
from vllm_overlay.compat.releases import READ, RELEASES, Seam, UnsupportedRelease, resolve_release, seam_for

NAMES = {*Seam.__annotations__, *(name for name in vars(Seam) if not name.startswith("_"))}


@pytest.mark.parametrize("release", [*RELEASES, *READ])
def test_every_seam_exports_every_name(release: str) -> None:
    seam = seam_for(release)
    assert len(NAMES) > 10
    assert [name for name in sorted(NAMES) if not hasattr(seam, name)] == []


def test_functions_take_what_the_protocol_says() -> None:
    """mypy looks at the oldest definition of a name that a later module defines again; this looks at each."""
    functions = {name for name in NAMES if callable(getattr(Seam, name, None))}
    assert len(functions) > 5
    for seam in (RELEASES | READ).values():
        for name in functions:
            expected = list(inspect.signature(getattr(Seam, name)).parameters)[1:]
            assert list(inspect.signature(getattr(seam, name)).parameters) == expected, (name_of(seam), name)


def name_of(seam: Any) -> str:
    return str(seam.__name__).rpartition(".")[2]


def test_a_seam_serves_no_release_that_is_older_than_it() -> None:
    for release, seam in (RELEASES | READ).items():
        first = Version(name_of(seam).removeprefix("since_").replace("_", "."))
        assert first.release[:2] <= Version(release).release[:2], f"{release} is served by {name_of(seam)}"


def test_releases_are_in_order() -> None:
    versions = [Version(release) for release in [*RELEASES, *READ]]
    assert versions == sorted(versions)


def test_a_release_that_was_read_is_refused_unless_the_user_says_so() -> None:
    with pytest.raises(UnsupportedRelease, match=r"VLLM_OVERLAY_POLICY=warn to try it as 0\.33\.0"):
        resolve_release("0.33.0", policy="strict", stands_for=None)
    assert resolve_release("0.33.0", policy="warn", stands_for=None) == "0.33.0"
    assert resolve_release("0.34.1", policy="warn", stands_for=None) == "0.33.0"
    assert resolve_release("0.1.dev1", policy="strict", stands_for="0.33.0") == "0.33.0"


def test_every_seam_module_serves_a_release() -> None:
    files = {file.stem for file in Path(compat.__file__).parent.glob("since_*.py")}
    assert files == {name_of(seam) for seam in (RELEASES | READ).values()}


@pytest.mark.parametrize(
    ("installed", "served_as"),
    [
        ("0.11.0.post2", "0.11.0"),
        ("0.11.2", "0.11.1"),
        ("0.14.0", "0.14.1"),
        ("0.16.0+cpu", "0.16.0"),
        ("0.16.1", "0.16.0"),
        ("0.32.5", "0.32.0"),
    ],
)
def test_a_point_release_is_served_as_its_line(installed: str, served_as: str) -> None:
    assert resolve_release(installed, policy="strict", stands_for=None) == served_as


@pytest.fixture
def seam() -> Any:
    vllm = importlib.import_module("vllm")
    return seam_for(resolve_release(vllm.__version__, policy="strict", stands_for=None))


def test_the_callers_request_id_is_found_in_the_engines(seam: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)
    engine_appends = "random_uuid" in Path(find_input_processor()).read_text(encoding="utf-8")
    assert seam.external_request_id("17-0a1b2c3d") == ("17" if engine_appends else "17-0a1b2c3d")
    if engine_appends:
        assert seam.external_request_id("job-deadbeef-0a1b2c3d") == "job-deadbeef"
    envs = importlib.import_module("vllm.envs")
    if "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION" in envs.environment_variables:
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
        assert seam.external_request_id("job-deadbeef") == "job-deadbeef"


def find_input_processor() -> str:
    """The file in which this release makes the engine's request ids."""
    engine = importlib.import_module("vllm.v1.engine")
    folder = Path(str(engine.__file__)).parent
    names = ("input_processor.py", "processor.py")
    return str(next(folder / name for name in names if (folder / name).is_file()))
