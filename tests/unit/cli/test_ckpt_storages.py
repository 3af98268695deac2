"""`polyaccel ckpt` on storages and URLs, and on folders above the one that was saved to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.checkpoint import Storage, TensorPiece, save_checkpoint
from polyaccel.checkpoint.storage.base import open_storage
from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.cli.main import main
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.testkit.ranks.threads import run_threads


def save(storage: Storage, tag: str, value: float) -> None:
    def part(communicator: Communicator) -> None:
        data = NumpyBuffer(np.full(3, value, dtype=np.float32))
        pieces = [TensorPiece("w", "param", (6,), DType.FLOAT32, 3 * communicator.rank, data)]
        save_checkpoint(storage, tag, communicator=communicator, pieces=pieces, scalars={"value": value}, rank_blobs={})

    run_threads(2, part)


@pytest.fixture(params=["memory", "file", "node_local", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, list[str]]:
    """Where two checkpoints are, and the options that say what kind of storage that is."""
    if request.param == "memory":
        pytest.importorskip("fsspec")
        found = f"memory://{tmp_path.name}/saves", open_storage("fsspec", f"memory://{tmp_path.name}/saves", {}), []
    elif request.param == "file":
        found = f"file://{tmp_path}", FileStorage(tmp_path), []
    else:
        storage = FileStorage(tmp_path)
        named = ["--storage", "node_local"] if request.param == "node_local" else []
        found = str(tmp_path), storage, named
    save(found[1], "one", 1.0)
    save(found[1], "two", 2.0)
    return found[0], found[2]


def test_every_verb_takes_it(place: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, named = place
    assert main(["ckpt", "ls", url, *named]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["tag", "two", "one"]
    assert main(["ckpt", "inspect", url, "--json", *named]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["tag"], shown["scalars"]) == ("two", {"value": 2.0})
    assert main(["ckpt", "inspect", f"{url}/one", "--json", *named]) == 0
    assert json.loads(capsys.readouterr().out)["scalars"] == {"value": 1.0}
    assert main(["ckpt", "verify", url, "--all", *named]) == 0
    assert capsys.readouterr().out.count(": whole; ") == 2
    assert main(["ckpt", "diff", f"{url}/one", f"{url}/two", *named]) == 1
    assert "w  param   " in " ".join(capsys.readouterr().out.split()).replace("w param", "w  param   ")
    assert main(["ckpt", "reshard", url, str(tmp_path / "anew"), "--ranks", "3", *named]) == 0
    assert main(["ckpt", "export", url, str(tmp_path / "out"), "--format", "safetensors", *named]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    capsys.readouterr()
    assert main(["ckpt", "ls", f"{url}/one", *named]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["tag", "one"]


def test_a_folder_above_is_told_from_a_broken_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = tmp_path / "run" / "checkpoint"
    save(FileStorage(saves), "one", 1.0)
    (tmp_path / "run" / "logs").mkdir()
    for verb in ("ls", "inspect", "verify"):
        assert main(["ckpt", verb, str(tmp_path / "run")]) != 0
        assert f"{tmp_path}/run holds no checkpoint; {saves} does" in capsys.readouterr().err
    # Beside a checkpoint it is no tag either, but what was cut off is one.
    save(FileStorage(tmp_path / "run"), "own", 2.0)
    shutil.copytree(tmp_path / "run" / "own", tmp_path / "run" / "cut")
    (tmp_path / "run" / "cut" / "commit.json").unlink()
    assert main(["ckpt", "ls", str(tmp_path / "run")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["tag", "own", "logs", "cut"]


def test_what_is_no_storage_is_refused_with_how_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", "runs", "--storage", '{"fsspec": 1, "file": 2}']) != 0
    assert "expected a name, or JSON with one" in capsys.readouterr().err
    assert main(["ckpt", "ls", "ftp://somewhere/runs"]) != 0
    assert "it takes URLs of s3://" in capsys.readouterr().err
    assert main(["ckpt", "ls", "s3://bucket/runs", "--storage", "file"]) != 0
    assert "is a URL, and the storage 'file' would make a folder" in capsys.readouterr().err
