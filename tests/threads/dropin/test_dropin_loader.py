"""The drop-in's loaders: DeepSpeed's orders and sizes, dealt to the ranks along the axis `data`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler
from transformer_models import transformer_model

from polyaccel.comm.base import Communicator
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

SIZES = [(13, 2, False), (13, 2, True), (7, 2, True), (16, 4, False), (11, 3, True)]
"""Samples, samples of a micro-batch, and whether what does not fill one is dropped."""
MEASURED = {
    (13, 2, False): ([[3, 0], [11, 12], [10, 9], [7]], [[4, 2], [8, 5], [6, 1], [3]]),
    (7, 2, True): ([[4, 5], [2, 1]], [[0, 3], [6, 4]]),
}
"""An epoch of rank 0 and of rank 1 under DeepSpeed 0.19.8 on two ranks; its second and third epochs are the same."""


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    """One rank alone opens torch's own group, which the ranks of another test are not in."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Numbers(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), float(index)), torch.zeros(1)


def config(micro_batch: int, drops: bool, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    sizes = {"train_micro_batch_size_per_gpu": micro_batch, "dataloader_drop_last": drops}
    return {**sizes, "gradient_clipping": 0.0, "optimizer": optimizer, **more}


def order_of(loader: Iterable[Any]) -> list[list[int]]:
    return [[int(value) for value in x.flatten()] for x, _ in loader]


def deepspeeds(count: int, size: int, drops: bool, ranks: int, rank: int, epoch: int = 0) -> list[list[int]]:
    """What DeepSpeed's loader is made of: torch's sampler with its defaults, and torch's loader."""
    sampler = DistributedSampler(Numbers(count), ranks, rank)
    sampler.set_epoch(epoch)
    return order_of(DataLoader(Numbers(count), size, sampler=sampler, drop_last=drops))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("count", "size", "drops"), SIZES)
def test_every_epoch_has_deepspeeds_order(count: int, size: int, drops: bool, ranks: int) -> None:
    def body(communicator: Communicator) -> tuple[list[Any], list[Any], int]:
        engine, _, loader, _ = deepspeed.initialize(
            model=nn.Linear(1, 1), config=config(size, drops), training_data=Numbers(count)
        )
        epochs = [order_of(loader) for _ in range(3)]
        length = len(loader)
        loader.data_sampler.set_epoch(5)
        fifth = order_of(loader)
        engine.destroy()
        return epochs, fifth, length

    for rank, (epochs, fifth, length) in enumerate(run_threads(ranks, body)):
        wanted = deepspeeds(count, size, drops, ranks, rank)
        assert epochs == [wanted] * 3
        assert fifth == deepspeeds(count, size, drops, ranks, rank, epoch=5)
        assert length == len(wanted)
        if ranks == 2 and (count, size, drops) in MEASURED:
            assert wanted == MEASURED[count, size, drops][rank]


@pytest.mark.parametrize("route", ["eval", "predict"])
def test_other_routes_keep_the_order(route: str) -> None:
    def body(communicator: Communicator) -> list[list[int]]:
        engine, *_ = deepspeed.initialize(model=nn.Linear(1, 1), config=config(2, True))
        found = order_of(engine.deepspeed_io(Numbers(7), route=route))
        engine.destroy()
        return found

    assert run_threads(1, body) == [[[0, 1], [2, 3], [4, 5]]]
    assert run_threads(2, body) == [[[0, 2], [4, 6]], [[1, 3], [5, 0]]]


def test_what_is_dropped_with_a_sampler_and_what_a_batch_is_made_by(tmp_path: Path) -> None:
    def doubled(samples: list[Any]) -> tuple[torch.Tensor, int]:
        return torch.stack([x for x, _ in samples]) * 2, 0

    def body(communicator: Communicator) -> None:
        engine, *_ = deepspeed.initialize(model=nn.Linear(1, 1), config=config(2, True), collate_fn=doubled)
        own = SequentialSampler(Numbers(7))
        loader = engine.deepspeed_io(Numbers(7), data_sampler=own)
        assert isinstance(loader, DeepSpeedDataLoader)
        assert loader.data_sampler is own
        assert order_of(loader) == [[0, 2], [4, 6], [8, 10]]
        assert len(loader) == 3
        plain = engine.deepspeed_io(
            Numbers(7), batch_size=3, route="eval", collate_fn=torch.utils.data.default_collate, num_local_io_workers=1
        )
        assert order_of(plain) == [[0, 1, 2], [3, 4, 5]]
        assert order_of(engine.deepspeed_io(Numbers(1), route="eval")) == []  # DeepSpeed gives none, too
        engine.destroy()

    run_threads(1, body)


def draws() -> int:
    """How often torch's loader has drawn on the process's generator since `torch.manual_seed(7)`."""
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        torch.manual_seed(7)
        for count in range(10):
            if torch.equal(torch.get_rng_state(), state):
                return count
            torch.empty((), dtype=torch.int64).random_()
    return -1


def test_loaders_draw_on_the_generator_of_the_process_as_deepspeeds() -> None:
    def body(communicator: Communicator) -> None:
        model = nn.Linear(1, 1)
        torch.manual_seed(7)
        engine, _, loader, _ = deepspeed.initialize(model=model, config=config(2, False), training_data=Numbers(8))
        counts = [draws()]
        order_of(loader)
        counts.append(draws())
        iter(loader)  # no sample is asked for
        counts.append(draws())
        repeating = RepeatingLoader(loader)
        counts.append(draws())
        for _ in range(5):  # into its second epoch
            next(repeating)
        counts.append(draws())
        order_of(engine.deepspeed_io(Numbers(8), route="eval"))
        counts.append(draws())
        engine.destroy()
        assert counts == [0, 1, 2, 3, 4, 5]  # DeepSpeed 0.19.8's

    run_threads(1, body)


def test_a_pipeline_begins_its_first_epoch_in_initialize() -> None:
    def body(communicator: Communicator) -> None:
        model = PipelineModule([nn.Linear(1, 1), nn.Linear(1, 1)], num_stages=1, loss_fn=nn.MSELoss())
        torch.manual_seed(7)
        engine, *_ = deepspeed.initialize(model=model, config=config(2, False), training_data=Numbers(8))
        counts = [draws()]
        for _ in range(5):
            engine.train_batch()
            counts.append(draws())
        engine.destroy()
        assert counts == [1, 1, 1, 1, 1, 2]  # DeepSpeed 0.19.8's

    run_threads(1, body)


def test_workers_are_seeded_as_torchs() -> None:
    def seeds(loader: Iterable[Any]) -> list[int]:
        torch.manual_seed(7)
        return [int(batch) for batch in loader]

    def body(communicator: Communicator) -> None:
        engine, *_ = deepspeed.initialize(model=nn.Linear(1, 1), config=config(2, False))
        ours = engine.deepspeed_io(Numbers(8), collate_fn=seed_of_worker, num_local_io_workers=1)
        engine.destroy()
        assert seeds(ours) == seeds(DataLoader(Numbers(8), 2, collate_fn=seed_of_worker, num_workers=1))

    run_threads(1, body)


def seed_of_worker(samples: list[Any]) -> torch.Tensor:
    return torch.tensor(torch.initial_seed())


AXES: dict[str, dict[str, Any]] = {
    "pipe": {},
    "sequence": {"sequence_parallel_size": 2, "sequence_parallel": {"method": "manual"}},
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
}


def model_of(axis: str) -> nn.Module:
    if axis == "pipe":
        layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
        return deepspeed.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    if axis == "tensor":
        return transformer_model("qwen2")
    return nn.Linear(1, 1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("route", ["train", "eval"])
def test_ranks_that_share_a_model_have_the_same_samples(axis: str, route: str) -> None:
    whole_models = [] if axis == "pipe" else [model_of(axis) for _ in range(4)]

    def body(communicator: Communicator) -> tuple[int, list[list[int]], list[list[int]]]:
        model = whole_models[communicator.rank] if whole_models else model_of(axis)
        given = config(2, False, **AXES[axis])
        engine, _, loader, _ = deepspeed.initialize(model=model, config=given, training_data=Numbers(11))
        found = order_of(engine.deepspeed_io(Numbers(11), route=route))
        place = engine.get_data_parallel_rank()
        whole = order_of(loader)
        engine.destroy()
        return place, found, whole

    results = run_threads(4, body)
    assert sorted(place for place, _, _ in results) == [0, 0, 1, 1]
    for place, found, whole in results:
        straight = DataLoader(Numbers(11), 2, sampler=DistributedSampler(Numbers(11), 2, place, shuffle=False))
        assert found == (deepspeeds(11, 2, False, 2, place) if route == "train" else order_of(straight))
        assert whole == (order_of(straight) if axis == "pipe" else deepspeeds(11, 2, False, 2, place))


def test_an_epoch_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """Another difference from DeepSpeed, whose loader begins again after a load."""

    def body(communicator: Communicator) -> tuple[list[list[int]], list[list[int]]]:
        torch.manual_seed(0)
        given = {"model": nn.Linear(1, 1), "config": config(2, False), "training_data": Numbers(13)}
        engine, _, loader, _ = deepspeed.initialize(**given)
        order_of(loader)
        stream = iter(loader)
        next(stream)
        engine.save_checkpoint(tmp_path, tag="t")
        rest = order_of(stream)
        engine.destroy()
        again, _, loader, _ = deepspeed.initialize(**{**given, "model": nn.Linear(1, 1)})
        again.load_checkpoint(tmp_path, tag="t")
        resumed = order_of(loader)
        again.destroy()
        return rest, resumed

    for rest, resumed in run_threads(2, body):
        assert rest == resumed
        assert len(rest) == 3


@pytest.mark.parametrize("given", [DataLoader(Numbers(4)), iter([1, 2]), 3], ids=["loader", "iterator", "number"])
def test_what_is_no_dataset_is_refused(given: Any) -> None:
    def body(communicator: Communicator) -> None:
        with pytest.raises(ConfigError) as caught:
            deepspeed.initialize(model=nn.Linear(1, 1), config=config(2, False), training_data=given)
        assert caught.value.problems[0].key == "training_data"

    run_threads(1, body)


def test_curriculum_learning_is_refused() -> None:
    with pytest.raises(ConfigError):
        DeepSpeedDataLoader(Numbers(4), 2, False, 0, None, deepspeed_dataloader_config={"curriculum_learning": True})
