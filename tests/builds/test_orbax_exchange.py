"""Orbax reads what is exported to it, and what it saved itself is imported.

`make test-exchange` has an environment with the library and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exchange_memory_job import COUNT, NUMEL

from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.checkpoint import TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.convert.elements import read
from polyaccel.cli.main import main
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

ocp = pytest.importorskip("orbax.checkpoint", reason="make test-exchange has an environment with it")
ml_dtypes = pytest.importorskip("ml_dtypes")

TENSORS = {
    ("layer.kernel", "param"): np.arange(6, dtype=np.float32).reshape(2, 3),
    ("layer.bias", "param"): np.ones(3, ml_dtypes.bfloat16),
    ("layer.kernel", "exp_avg"): np.full((2, 3), 0.5, np.float32),
    ("norm.mean", "buffer"): np.arange(4, dtype=np.float64),
    ("count", "buffer"): np.array(7, np.int32),
}


def save(directory: Path) -> None:
    def part(communicator: Communicator) -> None:
        pieces = [
            TensorPiece(fqn, kind, array.shape, buffer.dtype, 0, buffer)
            for (fqn, kind), array in TENSORS.items()
            for buffer in [NumpyBuffer(array.reshape(-1).copy())]
        ]
        save_checkpoint(directory, "t", communicator=communicator, pieces=pieces, scalars={}, rank_blobs={})

    run_threads(1, part)


def test_orbax_reads_an_export_and_it_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "c")
    assert main(["ckpt", "export", str(tmp_path / "c"), str(tmp_path / "out"), "--format", "orbax"]) == 0
    tree = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    assert set(tree) == {"params", "buffers", "optimizer"}
    assert np.array_equal(tree["params"]["layer"]["kernel"], TENSORS["layer.kernel", "param"])
    assert tree["params"]["layer"]["bias"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(tree["optimizer"]["exp_avg"]["layer"]["kernel"], np.full((2, 3), 0.5))
    assert main(["ckpt", "import", str(tmp_path / "out"), str(tmp_path / "back"), "--from", "orbax"]) == 0
    reader = open_checkpoint(tmp_path / "back")
    found = {(each.fqn, each.kind): each for each in reader.tensors()}
    assert set(found) == set(TENSORS)
    for key, array in TENSORS.items():
        assert read(reader, found[key], 0, array.size).tobytes() == array.tobytes()
        assert found[key].dtype.value == array.dtype.name
        assert found[key].shape == array.shape


def test_a_tree_without_params_is_all_parameters(tmp_path: Path) -> None:
    ocp.PyTreeCheckpointer().save(tmp_path / "tree", {"dense": {"kernel": np.ones((2, 2), np.float32)}})
    assert main(["ckpt", "import", str(tmp_path / "tree"), str(tmp_path / "c"), "--from", "orbax"]) == 0
    (entry,) = open_checkpoint(tmp_path / "c").tensors()
    assert (entry.fqn, entry.kind, entry.shape) == ("dense.kernel", "param", (2, 2))


def test_memory_is_bounded_and_progress_tells_every_byte(tmp_path: Path) -> None:
    """Of 24 tensors an export has some in memory; for an import the library reads more than it is asked for."""
    most = {"export": 8, "import": 24}
    job = Path(__file__).parents[1] / "support" / "saves" / "exchange_memory_job.py"
    done = subprocess.run(
        [sys.executable, str(job), str(tmp_path), "orbax"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["what"] for row in rows] == ["export", "import"]
    for row in rows:
        assert row["told"] == 2 * COUNT * 4 * NUMEL, row
        assert row["peak"] < most[row["what"]] * 4 * NUMEL, row


def test_what_is_no_orbax_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["ckpt", "import", str(tmp_path / "empty"), str(tmp_path / "c"), "--from", "orbax"]) == 1
    assert "is not a checkpoint of orbax" in capsys.readouterr().err
