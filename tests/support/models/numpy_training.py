"""The ZeRO step as a frontend without a framework drives it: numpy arrays, gradients by hand, ranks as threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.testkit.training import numpy_training as training
from polyaccel.testkit.training.numpy_training import GROUP, SHAPES, Arrays, batch, gradients, initial, train_plainly
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.policy import Placement, StepPolicy
from polyaccel.zero.update.optimizer_step import StepResult


class Views(training.InitialParams):
    """The parameters where the step keeps them, in their shapes."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self.arrays: Arrays = {}

    def on_bound(self, fqn: str, view: Buffer) -> None:
        self.arrays[fqn] = view.raw.reshape(SHAPES[fqn])


def make_step(
    communicator: Communicator, stage: int, step_policy: StepPolicy, **options: Any
) -> tuple[ZeroEngine, Arrays]:
    """A step over the problem's parameters (`options` as in the testkit's), and the parameters themselves."""
    views = Views(communicator)
    return training.make_step(communicator, stage, step_policy, views, **options), views.arrays


def accumulate(step: ZeroEngine, found: Arrays, *, is_last: bool = True, factor: float = 1.0) -> None:
    """One backward pass that hands over `found` times `factor`."""
    step.begin_backward(reduce=is_last or step.policy.grads is Placement.SHARDED)
    for fqn, gradient in found.items():
        flat = np.ascontiguousarray(gradient.reshape(-1) * np.float32(factor))
        step.reducer.add_gradient(fqn, step.accelerator.wrap(flat))
    step.reducer.end_backward()


def train(
    communicator: Communicator, stage: int, bucket_numel: int, micros: int, steps: int, clip: float
) -> tuple[Arrays, list[StepResult]]:
    """`steps` steps of `micros` micro-batches on this rank."""
    step, params = make_step(communicator, stage, StepPolicy(clip_norm=clip), bucket_numel=bucket_numel)
    results = []
    for number in range(steps):
        for micro in range(micros):
            _, found = gradients(params, *batch(number, micro, communicator.rank))
            accumulate(step, found, is_last=micro == micros - 1, factor=1 / micros)
        results.append(step.update([GROUP]))
    final = {fqn: array.copy() for fqn, array in params.items()}
    step.close()
    return final, results


def check_without_torch() -> None:
    """Train at every stage and compare, in a process that must not load torch."""
    import sys

    from polyaccel.testkit.ranks.threads import run_threads

    for world in (1, 2, 3):
        for micros, clip in ((1, 0.0), (3, 0.5)):
            wanted, norms = train_plainly(world, micros, 3, clip)
            for stage in (0, 1, 2):
                for bucket_numel in (64, 10**6):
                    arguments = (stage, bucket_numel, micros, 3, clip)
                    ranks = run_threads(world, train, *arguments, accelerator=CpuAccelerator("numpy"))
                    for params, results in ranks:
                        for fqn, value in wanted.items():
                            np.testing.assert_allclose(params[fqn], value, rtol=0, atol=1e-5)
                        np.testing.assert_allclose([result.grad_norm for result in results], norms, rtol=1e-5)
                        np.testing.assert_array_equal(params["idle"], initial()["idle"])
    loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "jax"))
    if loaded:
        raise AssertionError(f"loaded: {loaded[:5]}")
    print("36 runs agree")
