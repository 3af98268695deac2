"""Loaders and streams of torchdata, Hugging Face and WebDataset, resumed in the middle (`make test-loaders`)."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import make_config, on_threads
from torch import Tensor, nn

import polyaccel
from polyaccel.data import WholeStream
from polyaccel.errors import CheckpointError

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="make test-loaders has it")
datasets = pytest.importorskip("datasets", reason="make test-loaders has it")
by_node = pytest.importorskip("datasets.distributed", reason="make test-loaders has it")
wds = pytest.importorskip("webdataset", reason="make test-loaders has it")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other packages

COUNT = 60


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, number: Tensor) -> Tensor:
        self.seen += number.reshape(-1).int().tolist()
        loss: Tensor = self.layer(number.reshape(-1, 1).float()).square().mean()
        return loss


def run(communicator: Any, model: Any, make: Any, path: str, begin: int, steps: int) -> list[int]:
    data = make(communicator.rank, communicator.world_size)
    engine = polyaccel.initialize(model=model, training_data=data, config=make_config(2))[0]
    model.seen.clear()
    if begin:
        engine.load_checkpoint(path)
    for _ in range(begin, steps):
        engine.train_batch()
    if path and not begin:
        engine.save_checkpoint(path)
    engine.destroy()
    return list(model.seen)


def resumes(make: Callable[[int, int], Any], path: Path, *, begin: int, steps: int, other: bool) -> None:
    """Compare a run that stops at step `begin`, and on one rank continues where `other`, with one that does not."""
    wanted = on_threads(2, run, Seen, make, "", 0, steps)
    assert not set(wanted[0][:28]) & set(wanted[1][:28])
    first = on_threads(2, run, Seen, make, str(path), 0, begin)
    assert first == [one[: 4 * begin] for one in wanted]
    rest = on_threads(2, run, Seen, make, str(path), begin, steps)
    assert rest == [one[4 * begin :] for one in wanted]
    if other:
        alone = on_threads(1, run, Seen, make, str(path), begin, begin + 2)[0]
        pairs = [rank[4 * begin : 4 * begin + 4] for rank in wanted]
        assert alone == [sample for pair in zip(*pairs, strict=True) for sample in pair]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader(tmp_path: Path, workers: int) -> None:
    def make(rank: int, world: int) -> Any:
        part = list(range(rank, COUNT, world))
        return torchdata.StatefulDataLoader(part, batch_size=4, num_workers=workers, drop_last=True)

    resumes(make, tmp_path, begin=3, steps=9, other=False)
    with pytest.raises(CheckpointError):
        on_threads(1, run, Seen, make, str(tmp_path), 3, 4)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    for shard in range(4):
        lines = [json.dumps({"number": number}) for number in range(15 * shard, 15 * shard + 15)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [str(tmp_path / f"{shard}.jsonl") for shard in range(4)]


def streamed(shards: list[str]) -> Any:
    return datasets.load_dataset("json", data_files=shards, split="train", streaming=True).with_format("torch")


@pytest.mark.parametrize("by_state", [False, True])
def test_hugging_faces_streams_whole(tmp_path: Path, shards: list[str], by_state: bool) -> None:
    def make(rank: int, world: int) -> Any:
        return WholeStream(streamed(shards), resumes_by_state=by_state)

    resumes(make, tmp_path / "saved", begin=3, steps=9, other=True)


def test_hugging_faces_shuffled_streams(tmp_path: Path, shards: list[str]) -> None:
    def make(rank: int, world: int) -> Any:
        return WholeStream(streamed(shards).shuffle(seed=3, buffer_size=20))

    resumes(make, tmp_path / "saved", begin=9, steps=17, other=True)


def test_hugging_faces_streams_split_by_rank(tmp_path: Path, shards: list[str]) -> None:
    def make(rank: int, world: int) -> Any:
        return by_node.split_dataset_by_node(streamed(shards), rank, world)

    resumes(make, tmp_path / "saved", begin=3, steps=9, other=False)


def test_hugging_faces_datasets_by_number(tmp_path: Path) -> None:
    data = datasets.Dataset(
        datasets.table.InMemoryTable.from_pydict({"number": list(range(COUNT))}), fingerprint="numbers"
    )
    resumes(lambda rank, world: data, tmp_path / "saved", begin=3, steps=9, other=True)


def test_webdatasets_whole(tmp_path: Path) -> None:
    for shard in range(3):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for number in range(20 * shard, 20 * shard + 20):
                content = str(number).encode()
                entry = tarfile.TarInfo(f"{number:03d}.txt")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))

    def make(rank: int, world: int) -> Any:
        urls = [str(tmp_path / f"{shard}.tar") for shard in range(3)]
        samples = wds.WebDataset(urls, nodesplitter=lambda src: src, shardshuffle=False, empty_check=False)
        return WholeStream(samples.shuffle(10, initial=10, seed=4).map(lambda one: torch.tensor(int(one["txt"]))))

    resumes(make, tmp_path / "saved", begin=3, steps=7, other=True)
