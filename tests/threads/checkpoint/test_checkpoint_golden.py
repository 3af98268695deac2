"""Checkpoints that were committed long ago stay readable, and today's writer still writes the bytes of the last.

The folders of `tests/golden` were made by `save_golden`, and none is ever made again: another format gets another one.
`checkpoint_v1_1` has a digest in its manifest. In `checkpoint_v2` rank files are safetensors files, and the ranks hold
blocks of one tensor. The owner's note and a part of a folder's name are each save's own.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import allocate_numpy
from polyaccel.checkpoint import TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.format import pieces
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.testkit.ranks.threads import run_threads

GOLDEN = Path(__file__).parents[2] / "golden"
FORMATS = ("checkpoint_v1", "checkpoint_v1_1", "checkpoint_v2")
SCALARS: dict[str, Any] = {
    "global_steps": 12,
    "loss_scale": 65536.0,
    "client_state": {"best": (0.1, math.inf), "name": "épreuve", "raw": b"\0\xff", "$odd": [True, None, -0.0, 2**70]},
}
# Every tensor's shape and type, and its contents as the bytes that they are.
TENSORS: dict[tuple[str, str], tuple[tuple[int, ...], DType, bytes]] = {
    ("embed.weight", "param"): ((5, 3), DType.BFLOAT16, np.arange(0x3F80, 0x3F80 + 15, dtype="<u2").tobytes()),
    ("embed.weight", "master"): ((5, 3), DType.FLOAT32, (np.arange(15, dtype="<f4") / 7).tobytes()),
    ("embed.weight", "exp_avg"): ((5, 3), DType.FLOAT32, (np.arange(15, dtype="<f4") - 7).tobytes()),
    ("scale", "param"): ((), DType.FLOAT64, np.array([math.pi], dtype="<f8").tobytes()),
    ("steps", "param"): ((7,), DType.INT64, np.arange(-3, 4, dtype="<i8").tobytes()),
    ("nothing", "param"): ((0, 4), DType.FLOAT16, b""),
}
# Of format 2: query, key and value rows of two heads in one tensor, of which each rank has those of one head.
FUSED = np.arange(12 * 2, dtype="<f4").reshape(12, 2)
HEADS = [Block.whole(FUSED.shape).cut(0, *((4 * part + 2 * rank, 2) for part in range(3))) for rank in range(2)]


class Bytes(Buffer):
    """A buffer to save from: plain bytes that need no framework, not even for bfloat16."""

    def __init__(self, data: bytes, dtype: DType) -> None:
        self.data, self.dtype, self.numel = data, dtype, len(data) // dtype.itemsize

    def view(self, offset: int, numel: int) -> Buffer:
        size = self.dtype.itemsize
        return Bytes(self.data[offset * size : (offset + numel) * size], self.dtype)

    def to_bytes(self) -> bytes:
        return self.data

    raw = version = property(lambda self: None)  # type: ignore[assignment]
    bump_version = copy_from = fill = data_ptr = from_bytes = lambda self, *_: None  # type: ignore[assignment]


def save_golden(communicator: Communicator, place: Path) -> None:
    """Cut each tensor between two ranks, after a third of it."""
    mine = []
    for (fqn, kind), (shape, dtype, data) in TENSORS.items():
        numel = len(data) // dtype.itemsize
        low, high = (numel // 3, numel) if communicator.rank else (0, numel // 3)
        if low < high or not numel:
            part = Bytes(data[low * dtype.itemsize : high * dtype.itemsize], dtype)
            mine.append(TensorPiece(fqn, kind, shape, dtype, low, part))
    head = FUSED.reshape(3, 2, 2, 2)[:, communicator.rank].tobytes()
    block = HEADS[communicator.rank]
    mine.append(TensorPiece("qkv.weight", "param", FUSED.shape, DType.FLOAT32, 0, Bytes(head, DType.FLOAT32), block))
    save_checkpoint(
        place,
        "global_step12",
        communicator=communicator,
        pieces=mine,
        scalars=SCALARS,
        rank_blobs={"rng": b"rng of %d" % communicator.rank, "data": b"\x07"},
        about={"polyaccel": "0.0", "mesh": {"tensor": 2}},
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_committed_checkpoint_is_read_in_full(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    assert (reader.tag, reader.world_size) == ("global_step12", 2)
    assert repr(reader.scalars) == repr(SCALARS)
    assert [reader.rank_blobs(rank) for rank in range(2)] == [
        {"rng": b"rng of 0", "data": b"\x07"},
        {"rng": b"rng of 1", "data": b"\x07"},
    ]
    found = {(tensor.fqn, tensor.kind): (tensor.shape, tensor.dtype) for tensor in reader.tensors()}
    fused = found.pop(("qkv.weight", "param"), None)
    assert fused == (None if name.startswith("checkpoint_v1") else (FUSED.shape, DType.FLOAT32))
    assert found == {name: (shape, dtype) for name, (shape, dtype, _) in TENSORS.items()}
    for (fqn, kind), (_, dtype, data) in TENSORS.items():
        if dtype is not DType.BFLOAT16:
            buffer = allocate_numpy(len(data) // dtype.itemsize, dtype)
            reader.read_into(fqn, kind, 0, buffer.numel, buffer)
            assert buffer.to_bytes() == data


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_is_read_into_torch_memory(name: str) -> None:
    pytest.importorskip("torch")
    buffer = CpuAccelerator("torch").allocate(15, DType.BFLOAT16)
    open_checkpoint(GOLDEN / name).read_into("embed.weight", "param", 0, 15, buffer)
    assert buffer.to_bytes() == TENSORS["embed.weight", "param"][2]


def test_a_fused_tensor_of_two_ranks_is_read_whole() -> None:
    buffer = allocate_numpy(FUSED.size, DType.FLOAT32)
    reader = open_checkpoint(GOLDEN / "checkpoint_v2")
    reader.read_into("qkv.weight", "param", 0, FUSED.size, buffer)
    assert np.array_equal(buffer.raw.reshape(FUSED.shape), FUSED)
    assert reader.about == {"polyaccel": "0.0", "mesh": {"tensor": 2}}


def test_every_tool_opens_the_files_of_format_2() -> None:
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    for rank, path in enumerate(sorted(GOLDEN.glob("checkpoint_v2/*/save-*/*.safetensors"))):
        (header_nbytes,) = np.fromfile(path, "<u8", 1).tolist()
        header = json.loads(path.read_bytes()[8 : 8 + header_nbytes])
        starts = [each["data_offsets"][0] for name, each in header.items() if name[:4] not in ("__me", "__fi")]
        assert {(8 + header_nbytes + start) % 64 for start in starts} == {0}
        with safe_open(path, "pt") as file:
            fused = file.get_tensor(next(name for name in file.keys() if name.startswith("qkv")))  # noqa: SIM118
            embed = file.get_tensor(f"embed.weight:param[{'5:15' if rank else '0:5'}]")
        assert np.array_equal(fused.numpy(), FUSED.reshape(3, 2, 2, 2)[:, rank].reshape(6, 2))
        assert embed.dtype is torch.bfloat16
        assert (
            embed.view(torch.uint16).numpy().tobytes()
            == TENSORS["embed.weight", "param"][2][10 * rank :][: 20 if rank else 10]
        )
    assert rank == 1


def test_the_writer_still_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECE_NBYTES", 16)
    monkeypatch.setattr("polyaccel.checkpoint.save.protocol.time.time", lambda: 1.75e9)
    monkeypatch.setattr("polyaccel.checkpoint.format.save_folders.token_hex", lambda _: "5f0a77c2")
    run_threads(2, save_golden, tmp_path, accelerator=CpuAccelerator("numpy"))
    written = files_of(tmp_path)
    assert written.pop(Path("global_step12/save-0001-5f0a77c2/owner.json"))
    assert written == files_of(GOLDEN / FORMATS[-1])


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
