"""`polyaccel ckpt ls`, `inspect`, `verify` and `diff`, on checkpoints that are whole, damaged and unlike."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.checkpoint import TensorPiece, save_checkpoint
from polyaccel.cli.main import main
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.core.types import DType
from polyaccel.testkit.ranks.threads import run_threads

GOLDEN = Path(__file__).parents[2] / "golden"
CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": True}, "key of later": {"a": 1}}


def save(
    directory: Path, tag: str, tensors: Mapping[str, Any], *, ranks: int = 2, step: int = 7, blobs: bytes = b""
) -> None:
    """Save arrays as parameters, each cut in as many runs as there are ranks."""

    def part(communicator: Communicator) -> None:
        pieces = []
        for fqn, value in tensors.items():
            array = np.asarray(value)
            flat = array.reshape(-1)
            cuts = [flat.size * rank // ranks for rank in range(ranks + 1)]
            low, high = cuts[communicator.rank : communicator.rank + 2]
            buffer = NumpyBuffer(flat[low:high].copy())
            pieces.append(TensorPiece(fqn, "param", array.shape, buffer.dtype, low, buffer))
        save_checkpoint(
            directory,
            tag,
            communicator=communicator,
            pieces=pieces,
            scalars={"counters": {"global_steps": step}, "client_state": {"raw": b"ab"}},
            rank_blobs={"rng": blobs} if blobs else {},
            about={"packages": {"polyaccel": "0.1.0"}, "mesh": {"data": ranks}, "config": CONFIG},
        )

    run_threads(ranks, part)


WEIGHTS = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b.bias": np.ones(5, dtype=np.float16)}


def file_of(directory: Path, tag: str, rank: int) -> Path:
    (path,) = directory.glob(f"{tag}/save-*/rank{rank:05d}.safetensors")
    return path


def flip(path: Path, wanted: bytes) -> None:
    """Change the first byte of the bytes `wanted` in a file."""
    data = bytearray(path.read_bytes())
    data[data.index(wanted)] ^= 1
    path.write_bytes(data)


def test_ls_tells_good_ones_from_problems_and_from_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, "one", WEIGHTS, step=1)
    save(tmp_path, "sick", {"a.weight": np.array([1.0, np.nan], np.float32)}, step=2)
    save(tmp_path, "cut", WEIGHTS, step=3)
    file_of(tmp_path, "cut", 1).unlink()
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["one"].endswith("2     1  58 B  good")
    assert lines["sick"].endswith("not finite: a.weight")
    assert "rank00001.safetensors" in lines["cut"]
    assert "missing" in lines["cut"]
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    rows = {row["tag"]: row for row in json.loads(capsys.readouterr().out)}
    assert [rows["one"][key] for key in ("ranks", "step", "nbytes", "state")] == [2, 1, 58, "good"]
    assert {tag: row["is_latest"] for tag, row in rows.items()} == {"one": False, "sick": False, "cut": True}
    assert rows["cut"]["nbytes"] is None
    assert rows["one"]["saved_at_s"] > 1.7e9


def test_ls_of_nothing_good_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "one", WEIGHTS)
    file_of(tmp_path, "one", 0).write_bytes(b"")
    assert main(["ckpt", "ls", str(tmp_path)]) == 1
    assert "0 of" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
@pytest.mark.parametrize(("place", "said"), [("nowhere", "does not exist"), ("file", "is a file"), ("empty", "empty")])
def test_a_wrong_directory_is_named_with_a_cure(
    verb: str, place: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert main(["ckpt", verb, str(tmp_path / place)]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / place) in error
    assert said in error or "holds no checkpoint" in error
    assert "hint:" in error


def test_inspect_shows_tensors_values_and_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "one", WEIGHTS)
    assert main(["ckpt", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "by 2 ranks, step 7, 58 B" in out
    assert "packages: polyaccel 0.1.0" in out
    assert "mesh: data 2" in out
    assert 'default: {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "key of later": {"a": 1}}' in out
    assert out.count("a.weight  param  float32  [3, 4]  48 B") == 1
    assert 'client_state = {"raw": "<2 bytes>"}' in out
    assert main(["ckpt", "inspect", str(tmp_path / "one"), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    tensor = {"fqn": "b.bias", "kind": "param", "dtype": "float16", "shape": [5], "nbytes": 10}
    assert tree["tensors"][1] == {**tensor, "pieces": 2, "is_cut": False}
    assert tree["scalars"]["counters"] == {"global_steps": 7}
    assert tree["about"]["mesh"] == {"data": 2}
    assert tree["about"]["config"] == CONFIG


def test_inspect_names_the_tags_when_one_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "one", WEIGHTS)
    assert main(["ckpt", "inspect", str(tmp_path), "--tag", "two"]) == 1
    assert "pass tag='one'" in capsys.readouterr().err
    assert main(["ckpt", "inspect", str(tmp_path / "one"), "--tag", "two"]) == 1
    assert "is the checkpoint 'one', and --tag asks for 'two'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["checkpoint_v1", "checkpoint_v1_1", "checkpoint_v2"])
def test_every_format_is_verified(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(GOLDEN / name)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("global_step12: whole; ")
    assert captured.out.rstrip().endswith("B/s")
    assert captured.err == ""


def test_verify_names_each_damage_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "one", WEIGHTS, blobs=b"state of a generator")
    save(tmp_path, "two", WEIGHTS)
    flip(file_of(tmp_path, "one", 1), np.arange(6, 12, dtype=np.float32).tobytes())
    flip(file_of(tmp_path, "one", 0), b"state of a generator")
    assert main(["ckpt", "verify", str(tmp_path / "one")]) == 1
    first, *damages = capsys.readouterr().out.splitlines()
    assert first.startswith("one: 2 damaged; ")
    assert "rank00001.safetensors" in damages[0]
    assert "elements [6, 12) of 'a.weight' (param)" in damages[0]
    assert "'rng' of rank 0" in damages[1]
    assert main(["ckpt", "verify", str(tmp_path), "--tag", "two"]) == 0
    file_of(tmp_path, "two", 0).unlink()
    capsys.readouterr()
    assert main(["ckpt", "verify", str(tmp_path), "--all"]) == 1
    out = capsys.readouterr().out
    assert "two: " in out
    assert "one: 2 damaged" in out


def test_verify_reads_every_element_of_blocks_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(GOLDEN / "checkpoint_v2", tmp_path / "copy")
    (file,) = (tmp_path / "copy").glob("*/save-*/rank00001.safetensors")
    data = bytearray(file.read_bytes())
    assert main(["ckpt", "inspect", str(tmp_path / "copy"), "--json"]) == 0
    assert [each["fqn"] for each in json.loads(capsys.readouterr().out)["tensors"] if each["is_cut"]] == ["qkv.weight"]
    header = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + header])
    (name,) = (name for name in entries if name.startswith("qkv.weight:param@"))
    data[8 + header + entries[name]["data_offsets"][0]] ^= 0x80
    file.write_bytes(data)
    assert main(["ckpt", "verify", str(tmp_path / "copy")]) == 1
    assert "of the block" in capsys.readouterr().out


def test_diff_tells_what_is_missing_apart_and_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "A", "t", {**WEIGHTS, "gone": np.zeros(2, np.float32), "grown": np.zeros(2, np.float32)}, step=7)
    moved = WEIGHTS["a.weight"].copy()
    moved[0, 1] += 0.5  # from 1 to 1.5
    moved[2, 3] -= 2.0  # from 11 to 9
    others = {"b.bias": WEIGHTS["b.bias"].astype(np.float32), "new": np.zeros(1, np.float32)}
    save(tmp_path / "B", "t", {"a.weight": moved, **others, "grown": np.zeros(3, np.float32)}, ranks=3, step=8)
    arguments = ["ckpt", "diff", str(tmp_path / "A"), str(tmp_path / "B")]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "only in A: gone (param)" in out
    assert "only in B: new (param)" in out
    assert "counters.global_steps: 7 -> 8" in out
    assert "float16 / float32" in out
    assert "[2] / [3]" in out
    assert "0 tensors equal bit by bit, 3 not; 1 only in A, 1 in B" in out
    assert main([*arguments, "--json"]) == 1
    found = {each["fqn"]: each for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert found["a.weight"]["largest"] == 2.0
    assert found["a.weight"]["relative"] == 0.5 / 1.5
    assert (found["b.bias"]["largest"], found["b.bias"]["is_equal"]) == (0.0, False)
    assert found["grown"]["largest"] is None


def test_diff_of_the_same_numbers_saved_by_other_ranks_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = {**WEIGHTS, "c": np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)}
    save(tmp_path / "A", "t", sick, ranks=1)
    save(tmp_path / "B", "t", sick, ranks=3)
    a, b = str(tmp_path / "A" / "t"), str(tmp_path / "B" / "t")
    assert main(["ckpt", "diff", a, b]) == 0
    assert "3 tensors equal bit by bit, 0 not" in capsys.readouterr().out
    save(tmp_path / "B", "t", {**sick, "c": np.array([np.nan, np.inf, np.inf, 0.0], np.float32)})
    assert main(["ckpt", "diff", a, b, "--json"]) == 1
    found = {each["fqn"]: each for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert found["c"]["largest"] == float("inf")
    assert found["a.weight"]["is_equal"]


def test_diff_sees_through_blocks(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)

    def part(communicator: Communicator) -> None:
        columns = ((3 * communicator.rank, 3),)
        block = Block.whole(values.shape).cut(1, *columns)
        buffer = NumpyBuffer(np.ascontiguousarray(values[:, columns[0][0] :][:, :3]).reshape(-1))
        save_checkpoint(
            tmp_path / "B",
            "t",
            communicator=communicator,
            pieces=[TensorPiece("w", "param", values.shape, DType.FLOAT32, 0, buffer, block)],
            scalars={"counters": {"global_steps": 7}, "client_state": {"raw": b"ab"}},
            rank_blobs={},
        )

    run_threads(2, part)
    save(tmp_path / "A", "t", {"w": values})
    assert main(["ckpt", "diff", str(tmp_path / "A"), str(tmp_path / "B")]) == 0


def test_the_verbs_need_no_framework(tmp_path: Path) -> None:
    save(tmp_path, "one", WEIGHTS)
    script = f"""
import sys
from polyaccel.cli.main import main
for arguments in (["ls"], ["inspect"], ["verify"], ["diff", {str(tmp_path)!r}]):
    assert main(["ckpt", *arguments, {str(tmp_path)!r}]) == 0, arguments
print("loaded:", sorted({{"torch", "jax"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"
