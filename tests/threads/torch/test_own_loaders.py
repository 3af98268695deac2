"""Streams and loaders of a script's own: positions in checkpoints, in the middle of an epoch, at other world sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import make_config, on_threads
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import polyaccel
from polyaccel.data import WholeStream
from polyaccel.errors import CheckpointError, ConfigError, PolyaccelError
from polyaccel.torch.stream_loader import StreamDataLoader

LENGTH = 50


class Numbers(IterableDataset[Tensor]):
    """0 to 49 in an order of the epoch; counts what was read, and resumes by state."""

    def __init__(self) -> None:
        self.epoch = self.read = self.at = self.begin = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for self.at in range(begin + 1, LENGTH + 1):
            self.read += 1
            yield torch.tensor(float(order[self.at - 1]))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


def loader(micro: int, rank: int = 0, world: int = 1, *, by_state: bool = False, workers: int = 0) -> StreamDataLoader:
    stream = WholeStream(Numbers(), resumes_by_state=by_state)
    return StreamDataLoader(stream, micro_batch_size=micro, rank=rank, world_size=world, num_workers=workers)


def dealt(ranks: list[StreamDataLoader], count: int) -> list[int]:
    """The samples of `count` micro-batches in the order of the stream."""
    found: list[int] = []
    parts = [iter(one) for one in ranks]
    while len(found) < count * len(ranks) * ranks[0].micro_batch_size:
        micro = [next(part, None) for part in parts]
        if micro[0] is None:
            parts = [iter(one) for one in ranks]
            continue
        found += torch.stack([one for one in micro if one is not None], 1).reshape(-1).int().tolist()
    return found


@pytest.mark.parametrize(("by_state", "workers"), [(False, 0), (False, 1), (True, 0), (True, 1)])
@pytest.mark.parametrize("stop", [3, 12, 17])
def test_a_stream_continues_at_another_world_size(by_state: bool, workers: int, stop: int) -> None:
    options: dict[str, Any] = {"by_state": by_state, "workers": workers}
    wanted = dealt([loader(4)], 30)  # 12 micro-batches an epoch: two samples are left out
    assert sorted(wanted[:48]) != sorted(wanted[48:96])
    begun = [loader(2, rank, 2, **options) for rank in range(2)]
    assert dealt(begun, stop) == wanted[: 4 * stop]
    states = [json.loads(json.dumps(one.state_dict())) for one in begun]
    assert states[0] == states[1]
    others = [loader(1, rank, 4, **options) for rank in range(4)]
    for one in others:
        one.load_state_dict(states[0])
        assert one.state_dict() == states[0]
    middle = dealt(others, 2)
    again = loader(4, **options)
    again.load_state_dict(others[1].state_dict())
    assert middle + dealt([again], 28 - stop) == wanted[4 * stop :]
    reads_again = not by_state or workers
    read = others[0].dataset.stream.read  # type: ignore[attr-defined]
    assert workers or stop == 12 or read == 8 + (4 * (stop % 12) if reads_again else 0)


def test_what_is_no_whole_stream_is_refused() -> None:
    with pytest.raises(PolyaccelError):
        WholeStream(iter([1, 2]))
    with pytest.raises(PolyaccelError):
        WholeStream([1, 2], resumes_by_state=True)
    with pytest.raises(ConfigError):
        loader(1, workers=2)
    with pytest.raises(CheckpointError):
        loader(1).load_state_dict({"epoch": 0, "position": 3})


class Counting:
    """A loader with a state, as torchdata's contract has it: the next iteration continues at a loaded state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at, self.begin = rank, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, 9):
            yield torch.full((4, 3), float(10 * self.rank + self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": torch.tensor([self.rank])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["generator"]) == self.rank
        self.begin = state["at"] % 8


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen: list[int] = []

    def forward(self, batch: Tensor) -> Tensor:
        self.seen += batch.reshape(len(batch), -1)[:, 0].int().tolist()
        loss: Tensor = self.layer(batch.reshape(-1, 1).expand(-1, 3)).square().mean()
        return loss


def run(communicator: Any, model: Any, make: Any, path: str, first: bool, steps: int) -> list[int]:
    data = make(communicator.rank)
    engine, _, own, _ = polyaccel.initialize(model=model, training_data=data, config=make_config(1))
    assert own is data or isinstance(own, StreamDataLoader)
    model.seen.clear()
    if not first:
        engine.load_checkpoint(path)
    for _ in range(steps):
        engine.train_batch()
    if first and path:
        engine.save_checkpoint(path)
    engine.destroy()
    return list(model.seen)


def test_a_loader_of_the_scripts_own_resumes_on_as_many_ranks(tmp_path: Path) -> None:
    wanted = on_threads(2, run, Seen, Counting, "", True, 13)
    on_threads(2, run, Seen, Counting, str(tmp_path), True, 5)
    found = on_threads(2, run, Seen, Counting, str(tmp_path), False, 8)
    assert [one[20:] for one in wanted] == found
    with pytest.raises(CheckpointError):
        on_threads(1, run, Seen, Counting, str(tmp_path), False, 1)
    with pytest.raises(CheckpointError):
        on_threads(2, run, Seen, lambda rank: WholeStream(Numbers()), str(tmp_path), False, 1)


def test_a_loader_that_says_so_has_one_state_for_all_ranks(tmp_path: Path) -> None:
    class Elastic(Counting):
        state_is_shared = True

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert int(state["generator"]) == 0
            self.begin = state["at"]

    on_threads(2, run, Seen, Elastic, str(tmp_path), True, 5)
    assert on_threads(1, run, Seen, Elastic, str(tmp_path), False, 1) == [[6] * 4]


@pytest.mark.parametrize("by_state", [False, True])
def test_a_stream_in_an_engine_resumes_at_another_world_size(tmp_path: Path, by_state: bool) -> None:
    def make(rank: int) -> WholeStream:
        return WholeStream(Numbers(), resumes_by_state=by_state)

    wanted = on_threads(1, run, Seen, make, "", True, 12)[0]
    on_threads(2, run, Seen, make, str(tmp_path), True, 3)
    assert on_threads(1, run, Seen, make, str(tmp_path), False, 6)[0] == wanted[24:]


def test_what_a_loader_of_ones_own_does_not_follow_is_refused() -> None:
    sampling = {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 9}}
    config = make_config(0) | {"data_efficiency": {"enabled": True, "data_sampling": sampling}}
    for data in (Counting(0), WholeStream(Numbers())):
        with pytest.raises(ConfigError):
            polyaccel.initialize(model=Seen(), training_data=data, config=config)
    with pytest.raises(ConfigError):
        polyaccel.initialize(model=Seen(), training_data=Counting(0), collate_fn=list, config=make_config(0))
    with pytest.raises(ConfigError):
        polyaccel.initialize(model=Seen(), training_data=DataLoader(Numbers()), config=make_config(0))
