"""Updates that begin while gradients arrive: by events, not time, and safe when something fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from numpy_training import GROUP, SHAPES, accumulate, batch, gradients, initial, make_step

from polyaccel.accelerators.base import NullEvent, Stream
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.errors import CommTimeout, PolyaccelError
from polyaccel.offload.host import HostTier
from polyaccel.offload.nvme import NvmeTier
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.plan.policy import ReductionPolicy, StepPolicy
from polyaccel.zero.update.named_optimizers import slice_optimizer

NUMPY = CpuAccelerator("numpy")
TIERS: dict[str, type[Tier] | None] = {"device": None, "host": HostTier, "nvme": NvmeTier}
BUCKET = 64
stages = pytest.mark.parametrize("stage", [0, 1, 2])
tiers = pytest.mark.parametrize("tier", TIERS)


def opened(name: str, communicator: Communicator, path: Path) -> Tier | None:
    kind = TIERS[name]
    if kind is None:
        return None
    tier = kind()
    tier.open(NUMPY, NUMPY, TierOptions(rank=communicator.rank, path=str(path)))
    return tier


class LateWork(Work):
    """A reduction that ends only after `condition` says so, or that fails instead."""

    def __init__(self, work: Work, condition: Callable[[], None]) -> None:
        self._work, self._condition = work, condition

    def wait(self) -> None:
        self._condition()
        self._work.wait()

    def is_done(self) -> bool:
        return False


def delay(communicator: Any, condition: Callable[[int], None]) -> None:
    """Let `condition(bucket)` run before the wait for a bucket's gradients ends."""

    def delayed(call: Callable[..., Work]) -> Callable[..., Work]:
        def run(*args: Any, **kwargs: Any) -> Work:
            work = call(*args, **kwargs)
            return LateWork(work, lambda: condition(kwargs["bucket"])) if kwargs["label"] == "gradients" else work

        return run

    communicator.reduce_scatter = delayed(communicator.reduce_scatter)
    communicator.all_reduce = delayed(communicator.all_reduce)


def note_publishing(step: Any, note: Callable[[int], None]) -> None:
    publish = step.params.all_gather_updated

    def noted(index: int) -> None:
        publish(index)
        note(index)

    step.params.all_gather_updated = noted


@stages
@tiers
@pytest.mark.parametrize("optimizer", ["Adam", "Lamb"])
def test_early_buckets_are_updated_and_published_before_the_last_gradient_arrives(tmp_path, stage, tier, optimizer):
    """The last bucket's reduction ends when all others are published, and only then."""

    def train(communicator):
        step, params = make_step(
            communicator,
            stage,
            StepPolicy(),
            bucket_numel=BUCKET,
            optimizer=slice_optimizer(optimizer),
            tier=opened(tier, communicator, tmp_path),
        )
        last = step.layout.buckets[-1].index
        published: list[int] = []
        others_are_published = Event()

        def note(index: int) -> None:
            published.append(index)
            if len(published) == last:
                others_are_published.set()

        def condition(bucket: int) -> None:
            assert bucket != last or others_are_published.wait(30), f"only {published} were updated and published"

        delay(communicator, condition)
        note_publishing(step, note)
        before = {fqn: value.copy() for fqn, value in params.items()}
        for number in range(2):
            published.clear()
            others_are_published.clear()
            accumulate(step, gradients(params, *batch(number, 0, communicator.rank))[1])
            step.update([GROUP])
            assert published == [bucket.index for bucket in step.layout.buckets]
        assert last >= 2
        assert all((before[fqn] != params[fqn]).any() for fqn in params if fqn != "idle")
        step.close()

    run_threads(2, train, accelerator=NUMPY)


def trained(communicator, stage, tier, path, clip_norm, micros=2) -> Any:
    step, params = make_step(
        communicator, stage, StepPolicy(clip_norm=clip_norm), bucket_numel=BUCKET, tier=opened(tier, communicator, path)
    )
    results = []
    for number in range(3):
        for micro in range(micros):
            found = gradients(params, *batch(number, micro, communicator.rank))[1]
            accumulate(step, found, is_last=micro == micros - 1)
        results.append(step.update([GROUP], loss_scale=4.0))
    final = {fqn: value.copy() for fqn, value in params.items()}
    step.close()
    return final, results


@stages
@tiers
@pytest.mark.parametrize("world", [1, 3])
def test_numbers_are_those_of_an_update_that_knows_the_norm_before(tmp_path, stage, tier, world):
    """A bound that nothing reaches changes when the norm is known, and nothing else."""
    run = [run_threads(world, trained, stage, tier, tmp_path, bound, accelerator=NUMPY)[0] for bound in (0.0, 1e9)]
    (early, early_results), (late, late_results) = run
    assert early_results == late_results
    assert all(result.grad_norm > 0.0 for result in early_results)
    for fqn in SHAPES:
        np.testing.assert_array_equal(early[fqn], late[fqn])


@stages
def test_what_is_not_finite_goes_through_and_is_named_afterwards(stage):
    def train(communicator):
        step, _ = make_step(communicator, stage, StepPolicy(), bucket_numel=BUCKET)
        found = {fqn: np.ones(shape, np.float32) for fqn, shape in reversed(SHAPES.items())}
        if communicator.rank == 1:
            found["b1"].reshape(-1)[40] = np.inf
        accumulate(step, found)
        result = step.update([GROUP])
        assert (result.applied, result.grad_norm, result.first_nonfinite_param) == (True, float("inf"), "b1")

    run_threads(2, train, accelerator=NUMPY)


# Failures.


class Lost(CommTimeout):
    pass


def fail_at(communicator: Any, lost: set[int]) -> None:
    def condition(bucket: int) -> None:
        if bucket in lost:
            raise Lost(f"bucket {bucket} timed out")

    delay(communicator, condition)


def ones() -> dict[str, Any]:
    return {fqn: np.ones(shape, np.float32) for fqn, shape in reversed(SHAPES.items())}


@stages
@tiers
def test_half_an_update_is_neither_trained_on_nor_saved(tmp_path, stage, tier):
    def train(communicator):
        step, _ = make_step(
            communicator, stage, StepPolicy(), bucket_numel=BUCKET, tier=opened(tier, communicator, tmp_path)
        )
        accumulate(step, ones())
        step.update([GROUP])
        last = step.layout.buckets[-1].index
        lost = {last}
        fail_at(communicator, lost)
        accumulate(step, ones())
        with pytest.raises(Lost):
            step.update([GROUP])
        step.discard_gradients()
        uses: list[Callable[[], Any]] = [
            lambda: step.begin_backward(reduce=True),
            lambda: step.update([GROUP]),
            lambda: list(step.local_shards()),
        ]
        for use in uses:
            with pytest.raises(PolyaccelError) as caught:
                use()
            assert caught.value.value == 3
            assert str(last) in str(caught.value)
        assert set(step.steps.values()) == {1}
        lost.clear()
        step.consistency.mark_consistent()  # as loading does
        accumulate(step, ones())
        assert step.update([GROUP]).applied
        assert set(step.steps.values()) == {2}
        step.close()

    run_threads(1, train, accelerator=NUMPY)


@stages
@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["early", "after the norm"])
def test_a_failure_before_the_first_update_loses_gradients_and_nothing_else(stage, clip):
    policy = StepPolicy(clip_norm=clip, reduction=ReductionPolicy(max_in_flight=9))

    def train(communicator, fails):
        step, params = make_step(communicator, stage, policy, bucket_numel=BUCKET)
        lost = {0} if fails else set()
        fail_at(communicator, lost)
        accumulate(step, ones())
        if fails:
            with pytest.raises(Lost):
                step.update([GROUP])
            with pytest.raises(PolyaccelError) as caught:
                step.update([GROUP])
            assert "engine.zero_grad" in str(caught.value)
            for fqn, value in initial().items():
                np.testing.assert_array_equal(params[fqn], value)
            assert set(step.steps.values()) == {0}
            lost.clear()
            step.discard_gradients()
            accumulate(step, ones())
        step.update([GROUP])
        return {fqn: value.copy() for fqn, value in params.items()}

    wanted, found = (run_threads(1, train, fails, accelerator=NUMPY)[0] for fails in (False, True))
    for fqn in SHAPES:
        np.testing.assert_array_equal(found[fqn], wanted[fqn])


# Streams.


class NotedEvent(NullEvent):
    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)


class NotedStream(Stream):
    """A queue that runs everything at once and notes what it was told to wait for."""

    def __init__(self, owner: Streams, name: str) -> None:
        self._owner, self.name = owner, name
        self._recorded = 0

    def record(self) -> Any:
        self._recorded += 1
        return NotedEvent(f"{self.name}{self._recorded}")

    def wait(self, event: Any) -> None:
        self._owner.log.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        return None

    def use(self) -> Any:
        return self._owner.using(self)


class Streams(CpuAccelerator):
    """Numpy's memory with a stream of its own for whoever asks, beside the main one."""

    def __init__(self) -> None:
        super().__init__("numpy")
        self.log: list[str] = []
        self.main = self.active = NotedStream(self, "main")

    def new_stream(self) -> Stream:
        return NotedStream(self, "side")

    def current_stream(self) -> Stream:
        return self.active

    @contextmanager
    def using(self, stream: NotedStream) -> Iterator[None]:
        self.active = stream
        yield
        self.active = self.main


@stages
def test_a_gradient_leaves_the_device_behind_its_own_reduction_alone(stage):
    """On a stream that waits for what was queued when the bucket was launched, and for nothing queued later."""
    device = Streams()

    def train(communicator):
        tier = HostTier()
        tier.open(device, NUMPY, TierOptions())
        step, _ = make_step(communicator, stage, StepPolicy(), bucket_numel=BUCKET, tier=tier)
        delay(communicator, lambda bucket: device.log.append(f"{device.active.name} has bucket {bucket}"))
        accumulate(step, ones())
        device.log.append("update")
        step.update([GROUP])
        return [line for bucket in step.layout.buckets for line in expected(bucket.index)]

    def expected(index: int) -> list[str]:
        number = index + 1
        return [f"side waits for main{number}", f"side has bucket {index}", "main waits for side"]

    (wanted,) = run_threads(1, train, accelerator=device)
    seen = [line.rstrip("0123456789") if "for side" in line else line for line in device.log if line != "update"]
    assert seen[: len(wanted)] == wanted
    assert all(line.startswith("main waits for ") for line in seen[len(wanted) :])  # the norm comes after all copies
