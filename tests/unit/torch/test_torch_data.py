"""The torch loader: every sample once an epoch, ranks apart, and a restart that goes on at the next micro-batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from polyaccel.errors import CheckpointError, ConfigError
from polyaccel.torch.data import RepeatingLoader, ShardedDataLoader


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same without a length, that remembers which epochs it was asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Seeds(Dataset[tuple[int, float, int]]):
    """What a worker's generators give: torch's seed, and a draw of Python's generator."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        return torch.initial_seed(), random.random(), index


def loader(
    count: int, *, batch: int = 1, rank: int = 0, world: int = 1, **options: Any
) -> ShardedDataLoader[list[int]]:
    return ShardedDataLoader(
        Numbers(count), micro_batch_size=batch, rank=rank, world_size=world, collate_fn=list, **options
    )


def global_batches(loaders: list[ShardedDataLoader[list[int]]]) -> list[list[int]]:
    """One epoch: the samples of all ranks, micro-batch by micro-batch, in the global order."""
    epochs = [list(loader) for loader in loaders]
    assert len({len(epoch) for epoch in epochs}) == 1  # or ranks would wait for one another for ever
    return [[sample for row in zip(*batches, strict=True) for sample in row] for batches in zip(*epochs, strict=True)]


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


sizes = st.integers(1, 40)
batches = st.integers(1, 5)
worlds = st.integers(1, 4)


@given(count=sizes, batch=batches, world=worlds)
@settings(max_examples=60)
def test_every_sample_comes_once_an_epoch(count: int, batch: int, world: int) -> None:
    ranks = [loader(count, batch=batch, rank=rank, world=world) for rank in range(world)]
    seen = flat(global_batches(ranks))
    assert sorted(seen[:count]) == list(range(count))
    # What fills up the last round is the epoch's beginning.
    padding = -count % world
    assert seen[count:] == (seen[:count] * world)[:padding]
    assert [len(rank) for rank in ranks] == [-(-count // (batch * world))] * world


@given(count=sizes, batch=batches, world=worlds)
@settings(max_examples=60)
def test_drop_last_gives_full_micro_batches_and_no_sample_twice(count: int, batch: int, world: int) -> None:
    whole = count // (batch * world)
    if not whole:
        with pytest.raises(ConfigError) as caught:
            loader(count, batch=batch, world=world, drop_last=True)
        assert [problem.key for problem in caught.value.problems] == ["training_data"]
        assert all(part in str(caught.value) for part in ("dataloader_drop_last", str(batch * world)))
        return
    ranks = [loader(count, batch=batch, rank=rank, world=world, drop_last=True) for rank in range(world)]
    seen = global_batches(ranks)
    assert [len(samples) for samples in seen] == [batch * world] * whole == [batch * world] * len(ranks[0])
    assert len(set(flat(seen))) == whole * batch * world


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_that_of_torchs_own_sampler(shuffle: bool, drop_last: bool) -> None:
    for rank in range(3):
        ours = loader(23, batch=2, rank=rank, world=3, seed=7, shuffle=shuffle, drop_last=drop_last)
        sampler = DistributedSampler(Numbers(23), 3, rank, shuffle=shuffle, seed=7, drop_last=drop_last)
        theirs = DataLoader(Numbers(23), batch_size=2, sampler=sampler, collate_fn=list, drop_last=drop_last)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert list(ours) == list(theirs)


def test_epochs_have_different_orders_and_the_same_seed_the_same() -> None:
    first, again, other = loader(30), loader(30), loader(30, seed=1)
    orders = [list(first) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [list(again) for _ in range(3)] == orders
    assert list(other) != orders[0]


@given(count=sizes, batch=batches, world=worlds, drop_last=st.booleans(), data=st.data())
@settings(max_examples=60)
def test_a_restart_goes_on_at_the_next_micro_batch(
    count: int, batch: int, world: int, drop_last: bool, data: st.DataObject
) -> None:
    if drop_last and count < batch * world:
        return
    rank = data.draw(st.integers(0, world - 1))
    straight = loader(count, batch=batch, rank=rank, world=world, drop_last=drop_last)
    stream = iter(RepeatingLoader(straight))
    list(islice(stream, data.draw(st.integers(0, 3 * len(straight)))))
    resumed = loader(count, batch=batch, rank=rank, world=world, drop_last=drop_last)
    resumed.load_state_dict(straight.state_dict())
    ahead = 2 * len(straight) + 1
    assert list(islice(RepeatingLoader(resumed), ahead)) == list(islice(stream, ahead))
    assert resumed.state_dict() == straight.state_dict()


@given(count=st.integers(8, 60), before=worlds, after=worlds, batch=batches, data=st.data())
@settings(max_examples=60)
def test_a_restart_at_another_world_size_gives_the_rest_of_the_epoch(
    count: int, before: int, after: int, batch: int, data: st.DataObject
) -> None:
    saved = [loader(count, batch=2, rank=rank, world=before) for rank in range(before)]
    done = data.draw(st.integers(0, len(saved[0]) - 1))
    seen = [list(islice(rank, done)) for rank in saved]
    resumed = [loader(count, batch=batch, rank=rank, world=after) for rank in range(after)]
    for rank in resumed:
        rank.load_state_dict(saved[0].state_dict())
    rest = flat(global_batches(resumed))[: count - done * 2 * before]
    assert sorted(rest + [sample for rank in seen for batch_ in rank for sample in batch_]) == list(range(count))


@given(
    batches=st.integers(1, 5),
    starts=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2]), st.integers(0, 7)), max_size=6
    ),
)
@settings(deadline=None, max_examples=60)
def test_starts_of_any_numbers_of_ranks_see_each_sample_once_an_epoch(
    batches: int, starts: list[tuple[int, int, int]]
) -> None:
    """A job that goes on with fewer ranks, or more, at the end of any step, and the same global batch: (ranks,
    micro-batches of a step, steps) of each start."""
    global_batch, seen, state = 24, list[int](), None
    for world, micro_batches, steps in starts:
        size = global_batch // world // micro_batches
        data = Numbers(batches * global_batch)
        loaders = [ShardedDataLoader[Any](data, micro_batch_size=size, rank=r, world_size=world) for r in range(world)]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(state)
        ranks = [iter(RepeatingLoader(loader)) for loader in loaders]
        for _ in range(steps * micro_batches):
            for rank in ranks:
                seen += next(rank).tolist()
        (state, *others) = [loader.state_dict() for loader in loaders]
        assert all(other == state for other in others)
    epoch = batches * global_batch
    for first in range(0, len(seen) // epoch * epoch, epoch):
        assert sorted(seen[first : first + epoch]) == list(range(epoch))


def test_a_state_saved_after_the_last_micro_batch_begins_the_next_epoch() -> None:
    straight, resumed = loader(6, batch=2), loader(6, batch=2)
    list(islice(iter(straight), 3))  # exhausted, but nobody has asked for a fourth
    assert straight.state_dict() == {"epoch": 1, "position": 0, "samples": 6, "seed": 0, "shuffle": True}
    resumed.load_state_dict(straight.state_dict())
    assert list(resumed) == list(straight)


def test_a_remainder_too_small_for_the_new_batch_is_left_out() -> None:
    saved, resumed = loader(10, batch=2, drop_last=True), loader(10, batch=4, drop_last=True)
    list(islice(iter(saved), 4))
    resumed.load_state_dict(saved.state_dict())
    assert len(list(resumed)) == 2
    assert resumed.epoch == 2


def test_an_epoch_left_early_is_not_gone_on_with() -> None:
    left, whole = loader(12), loader(12)
    list(islice(iter(left), 5))
    list(whole)
    assert list(left) == list(whole)


@pytest.mark.parametrize("other", [loader(11), loader(12, seed=1), loader(12, shuffle=False)])
def test_a_position_in_other_data_is_refused(other: ShardedDataLoader[list[int]]) -> None:
    with pytest.raises(CheckpointError) as caught:
        loader(12).load_state_dict(other.state_dict())
    assert caught.value.value


def test_a_broken_position_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        loader(12).load_state_dict(loader(12).state_dict() | {"position": -1})
    assert caught.value.value == {"position": -1}


def streaming(count: int, batch: int, world: int = 1, **options: Any) -> ShardedDataLoader[list[int]]:
    return ShardedDataLoader(Stream(count), micro_batch_size=batch, world_size=world, collate_fn=list, **options)


@pytest.mark.parametrize("done", range(9))
def test_a_stream_resumes_by_reading_past_what_was_seen(done: int) -> None:
    straight, resumed = streaming(7, 2), streaming(7, 2)
    ahead = iter(RepeatingLoader(straight))
    list(islice(ahead, done))
    resumed.load_state_dict(straight.state_dict())
    assert list(islice(RepeatingLoader(resumed), 9)) == list(islice(ahead, 9))
    assert resumed.state_dict() == straight.state_dict()


def test_a_stream_is_told_its_epoch_and_counts_for_all_ranks() -> None:
    straight = streaming(6, 2, world=3, drop_last=True)
    list(straight)
    list(islice(iter(straight), 2))
    assert isinstance(straight.dataset, Stream)
    assert straight.dataset.epochs == [0, 1]
    assert straight.state_dict()["position"] == 2 * 2 * 3
    with pytest.raises(TypeError):
        len(straight)


def test_a_stream_resumed_in_the_middle_of_a_micro_batch_repeats_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved, resumed = streaming(12, 3), streaming(12, 2)
    list(islice(iter(saved), 1))
    resumed.load_state_dict(saved.state_dict())
    assert next(iter(resumed)) == [2, 3]
    assert "1 samples come again" in caplog.text


def seeds(**options: Any) -> list[tuple[int, float, int]]:
    made = ShardedDataLoader[list[tuple[int, float, int]]](
        Seeds(), micro_batch_size=1, shuffle=False, collate_fn=list, num_workers=2, **options
    )
    return [sample for batch in made for sample in batch]


def test_workers_have_their_own_seeds_and_leave_the_process_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, again = seeds(seed=3), seeds(seed=3)
    assert one == again
    assert len({torch_seed for torch_seed, _, _ in one}) == 2
    assert len({draw for _, draw, _ in one}) == 4
    others = {torch_seed for torch_seed, _, _ in seeds(seed=3, rank=1, world_size=2)}
    assert others.isdisjoint(torch_seed for torch_seed, _, _ in one)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_worker_seeds_change_with_the_epoch() -> None:
    made: ShardedDataLoader[Any] = ShardedDataLoader(Seeds(), micro_batch_size=1, collate_fn=list, num_workers=1)
    first, second = ([batch[0][0] for batch in made] for _ in range(2))
    assert set(first).isdisjoint(second)


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"micro_batch_size": 0}, "train_micro_batch_size_per_gpu"),
        ({"micro_batch_size": 1, "rank": 2, "world_size": 2}, "rank"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ShardedDataLoader(Numbers(3), **sizes)
    assert caught.value.problems[0].key == key


def test_data_that_gives_nothing_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        loader(0)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("training_data", 0)]
    for none in (object(), torch.utils.data.DataLoader(Numbers(3)), iter([1, 2])):
        with pytest.raises(ConfigError) as caught:
            ShardedDataLoader(none, micro_batch_size=1)  # type: ignore[arg-type]
        assert caught.value.problems[0].value == type(none).__name__
    with pytest.raises(ConfigError) as caught:
        next(iter(RepeatingLoader([])))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("training_data", [])]


def test_a_repeating_loader_is_an_iterator() -> None:
    """`next` goes on where another loop left, and begins another epoch where one has ended."""
    repeating = RepeatingLoader([1, 2, 3])
    assert iter(repeating) is repeating
    assert [next(repeating), next(repeating)] == [1, 2]
    assert list(islice(repeating, 5)) == [3, 1, 2, 3, 1]
    assert next(repeating) == 2


def test_without_reshuffles_epochs_are_equal_until_the_sampler_is_told() -> None:
    fixed = ShardedDataLoader[Any](Numbers(9), micro_batch_size=2, reshuffles=False)
    first = [batch.tolist() for batch in fixed]
    assert [batch.tolist() for batch in fixed] == first
    assert fixed.sampler is not None
    fixed.sampler.set_epoch(1)
    assert [batch.tolist() for batch in fixed] != first


def test_tensors_are_collated_as_by_torch() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    features, labels = next(iter(ShardedDataLoader[Any](data, micro_batch_size=3, shuffle=False)))
    assert torch.equal(features, torch.arange(6.0).reshape(3, 2))
    assert torch.equal(labels, torch.arange(3))
