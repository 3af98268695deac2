"""What belongs to this user alone: planted links are not followed, and folders of others are not used."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from polyaccel.core import user_dirs
from polyaccel.core.user_dirs import atomic_write_private, ensure_private_dir, runtime_folder

STRANGER = 12345
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = ensure_private_dir(tmp_path / "mine")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)  # as older versions made it
    assert stat.S_IMODE(ensure_private_dir(folder).stat().st_mode) == 0o700


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError) as caught:
        ensure_private_dir(tmp_path / "mine")
    assert caught.value.filename == str(tmp_path / "mine")


def test_a_folder_that_others_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o777)
    with pytest.raises(PermissionError) as caught:
        ensure_private_dir(tmp_path / "mine")
    assert "777" in str(caught.value)


@only_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    os.chown(tmp_path / "mine", STRANGER, STRANGER)
    with pytest.raises(PermissionError) as caught:
        ensure_private_dir(tmp_path / "mine")
    assert str(STRANGER) in str(caught.value)


def test_a_file_takes_the_place_of_a_planted_link_and_leaves_its_target_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "file").symlink_to(victim)
    atomic_write_private(tmp_path / "file", b"new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "victim"]


def test_a_name_that_is_guessed_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(user_dirs.secrets, "token_hex", lambda nbytes: "guessed")
    (tmp_path / ".file.guessed.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        atomic_write_private(tmp_path / "file", b"new")
    assert victim.read_text() == "precious"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_write_private(tmp_path / "file", b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_runtime_folder_is_the_systems_if_that_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_dirs.tempfile, "gettempdir", lambda: "/shared")
    shared = Path("/shared", f"polyaccel-{os.geteuid()}")
    given = tmp_path / "runtime"
    environ = {"XDG_RUNTIME_DIR": str(given)}
    assert runtime_folder({}) == runtime_folder(environ) == shared
    given.mkdir(mode=0o700)
    assert runtime_folder(environ) == given / "polyaccel"
    given.chmod(0o755)
    assert runtime_folder(environ) == shared


@only_root
def test_the_systems_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    given = tmp_path / "runtime"
    given.mkdir(mode=0o700)
    os.chown(given, STRANGER, STRANGER)
    assert runtime_folder({"XDG_RUNTIME_DIR": str(given)}).parent != given
