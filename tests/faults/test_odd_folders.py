"""Folders of checkpoints that somebody else has touched: `latest` as anything, tags that lead elsewhere, clocks that
jump, owners that nobody can read. A run goes on from a whole checkpoint, and nothing outside is read or written."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_table import TABLE, Ends
from one_value import left_behind, save, value_of

from polyaccel.checkpoint import list_checkpoints
from polyaccel.checkpoint.retention import Retention
from polyaccel.errors import CheckpointError

NEWEST = Ends("a warning that names the file and the tag taken instead", "the newest whole checkpoint", code="0")
REFUSED = Ends("names the tag, and what a tag may be", "as before the call")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the tags `a` (1.0) and `b` (2.0), beside a file and a folder of somebody else."""
    place = tmp_path / "saves"
    for tag, value in (("a", 1.0), ("b", 2.0)):
        save(place, value, tag=tag)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "precious").write_bytes(b"a\n")
    return place


def garbage(latest: Path) -> None:
    latest.write_bytes(bytes(range(256)))


def empty(latest: Path) -> None:
    latest.write_bytes(b"")


def huge(latest: Path) -> None:
    latest.write_bytes(b"b" * 2**20)


def out_of_the_folder(latest: Path) -> None:
    latest.write_text("../elsewhere")


def absolute(latest: Path) -> None:
    latest.write_text(str(latest.parent / "a"))


def of_nothing(latest: Path) -> None:
    latest.write_text("c")


def missing(latest: Path) -> None:
    latest.unlink()


def a_folder(latest: Path) -> None:
    latest.unlink()
    latest.mkdir()


def a_dangling_link(latest: Path) -> None:
    latest.unlink()
    latest.symlink_to(latest.parent.parent / "nothing")


def a_link_to_itself(latest: Path) -> None:
    latest.unlink()
    latest.symlink_to(latest.name)


@pytest.mark.parametrize(
    "damage",
    [
        garbage,
        empty,
        huge,
        out_of_the_folder,
        absolute,
        of_nothing,
        missing,
        a_folder,
        a_dangling_link,
        a_link_to_itself,
    ],
    ids=lambda function: function.__name__,
)
def test_a_latest_that_names_no_checkpoint_costs_a_warning(
    damage: Callable[[Path], None], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TABLE.case(f"`latest`: {damage.__name__.replace('_', ' ')}", NEWEST):
        damage(place / "latest")
        with caplog.at_level(logging.WARNING):
            assert value_of(place, fallback=True) == 2.0
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "loading 'b', the newest complete checkpoint, instead" in warning
        with pytest.raises(CheckpointError) as caught:
            value_of(place)
        assert "b, a" in str(caught.value)
        if damage is not a_folder:  # which a file cannot replace
            save(place, 3.0, tag="c")
            assert value_of(place) == 3.0
            assert not (place / "latest").is_symlink()
        assert list((place.parent / "elsewhere").iterdir()) == []


def test_a_latest_that_is_a_link_is_read_and_replaced_and_not_written_through(place: Path) -> None:
    with TABLE.case("`latest`: a link to a file elsewhere", Ends("none", "the tag that the file names", code="0")):
        (place / "latest").unlink()
        (place / "latest").symlink_to(place.parent / "precious")
        assert value_of(place) == 1.0
        save(place, 3.0, tag="c")
        assert (place.parent / "precious").read_bytes() == b"a\n"
        assert value_of(place) == 3.0


@pytest.mark.parametrize(
    "tag", ["..", "../elsewhere", "a/../../elsewhere", "/tmp/x", ".", "", "a\\b", "c:d", "latest", "a\n", "\0", " a"]
)
def test_a_tag_that_leads_elsewhere_is_refused(tag: str, place: Path) -> None:
    before = sorted(path.relative_to(place.parent) for path in place.parent.rglob("*"))
    with TABLE.case("a tag with `..`, `/` and the like, saved or loaded", REFUSED):
        for in_background in (False, True):
            with pytest.raises(CheckpointError) as caught:
                save(place, 9.0, tag=tag, in_background=in_background)
            assert caught.value.value == (0,)
        with pytest.raises(CheckpointError) as caught:
            value_of(place, tag)
        assert caught.value.value == tag
        assert sorted(path.relative_to(place.parent) for path in place.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "jump_s", [-365 * 86400.0, -1.0, 365 * 86400.0], ids=["a year back", "a second back", "a year on"]
)
def test_a_clock_that_jumps_changes_no_order(jump_s: float, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest is the last that was saved, for resuming and for what retention keeps."""
    import time

    with TABLE.case("a clock that jumps between saves", Ends("none", "the last save is the newest", code="0")):
        now = time.time()
        monkeypatch.setattr("time.time", lambda: now + jump_s)
        save(place, 3.0, tag="c")
        monkeypatch.setattr("time.time", lambda: now + 1)
        save(place, 4.0, tag="d", retention=Retention(keep_last=2))
        assert [status.tag for status in list_checkpoints(place)] == ["d", "c"]
        (place / "latest").unlink()
        assert value_of(place, fallback=True) == 4.0
        assert left_behind(place) == []


@pytest.mark.parametrize("contents", [b"", b"{}", b"\xff" * 100, None], ids=["empty", "other", "garbage", "missing"])
def test_an_owner_that_cannot_be_read_is_in_nobody_s_way(contents: bytes | None, place: Path) -> None:
    with TABLE.case("owner.json damaged or missing", Ends("none", "the checkpoint loads, and is replaced", code="0")):
        (owner,) = (place / "b").glob("save-*/owner.json")
        if contents is None:
            owner.unlink()
        else:
            owner.write_bytes(contents)
        assert value_of(place) == 2.0
        save(place, 3.0, tag="b")
        assert value_of(place) == 3.0
        assert left_behind(place) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Here a file stands where the folder should be; rights are no hindrance to root."""
    (tmp_path / "saves").write_text("a file")
    with TABLE.case("a file in the place of the folder", Ends("names the file, with a hint", "as before")):
        for in_background in (False, True):
            with pytest.raises(CheckpointError) as caught:
                save(tmp_path / "saves", 1.0, in_background=in_background)
            assert caught.value.value == (0,)
            assert caught.value.hint
        assert os.listdir(tmp_path) == ["saves"]
