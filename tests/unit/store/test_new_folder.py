"""A folder that appears whole or not at all, wherever it is to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_overlay.store import StoreError
from vllm_overlay.store.new_folder import new_folder


def fill(path: Path) -> None:
    with new_folder(path) as unfinished:
        (unfinished / "file").write_text("whole")


def test_an_empty_folder_is_replaced_and_a_link_leads_to_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("deep/absent")
    fill(tmp_path / "link")
    fill(tmp_path / "dangling")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert (tmp_path / "empty" / "file").read_text() == "whole"
    assert (tmp_path / "deep" / "absent" / "file").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "deep", "empty", "link"]


@pytest.mark.parametrize("name", [".", "../here"])
def test_the_current_folder_is_refused_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(StoreError, match="is the current folder, in whose place no other can be put: name a folder in"):
        fill(Path(name))
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_mount_point_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(StoreError, match=f"{tmp_path} is a mount point, in whose place no other can be put"):
        fill(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_folder(tmp_path / "new") as unfinished:
        (unfinished / "file").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
