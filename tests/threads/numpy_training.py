"""The ZeRO step as a frontend without a framework drives it: numpy arrays, gradients by hand, ranks as threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.buffer import Buffer
from polyaccel.comm.base import Communicator
from polyaccel.offload.device import DeviceTier
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.types import DType, ParamSpec
from polyaccel.zero.layout import plan_layout
from polyaccel.zero.optimizers import Adam, SliceOptimizer
from polyaccel.zero.params import ParamObserver
from polyaccel.zero.placement import StatePlacement
from polyaccel.zero.policy import Placement, ZeroPolicy
from polyaccel.zero.step import ZeroStep
from polyaccel.zero.update import StepPolicy, StepResult

Arrays = dict[str, Any]
SHAPES = {"w1": (5, 41), "b1": (41,), "w2": (41,), "scale": (), "idle": (3,)}
GROUP = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}


def initial() -> Arrays:
    """Float32 values of every parameter, always the same."""
    random = np.random.default_rng(0)
    return {fqn: np.asarray(random.normal(size=shape), dtype=np.float32) for fqn, shape in SHAPES.items()}


def batch(step: int, micro: int, rank: int) -> tuple[Any, Any]:
    random = np.random.default_rng([step, micro, rank])
    return random.normal(size=(6, 5)).astype(np.float32), random.normal(size=6).astype(np.float32)


def gradients(params: Arrays, inputs: Any, targets: Any) -> tuple[float, Arrays]:
    """The loss mean((scale * tanh(x w1 + b1) w2 - t)^2) and its gradients, the last layer's first."""
    hidden = np.tanh(inputs @ params["w1"] + params["b1"])
    raw = hidden @ params["w2"]
    error = params["scale"] * raw - targets
    d_output = 2 * error / len(targets)
    d_raw = d_output * params["scale"]
    d_hidden = np.outer(d_raw, params["w2"]) * (1 - hidden**2)
    found = {
        "scale": np.asarray((d_output * raw).sum()),
        "w2": hidden.T @ d_raw,
        "b1": d_hidden.sum(axis=0),
        "w1": inputs.T @ d_hidden,
    }
    return float((error**2).mean()), {fqn: np.asarray(value, dtype=np.float32) for fqn, value in found.items()}


class Views(ParamObserver):
    """The parameters where the step keeps them, in their shapes."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    def on_bound(self, fqn: str, view: Buffer) -> None:
        self.arrays[fqn] = view.raw.reshape(SHAPES[fqn])


def make_step(
    communicator: Communicator,
    stage: int,
    step_policy: StepPolicy,
    *,
    bucket_numel: int,
    dtype: DType = DType.FLOAT32,
    optimizer: SliceOptimizer | None = None,
    tier: Tier | None = None,
) -> tuple[ZeroStep, Arrays]:
    """A step over the problem's parameters, and the parameters themselves. All states rest in `tier`, which is open;
    None: on the device."""
    accelerator = communicator.accelerator
    device = DeviceTier()
    device.open(accelerator, accelerator, TierOptions(run_id="numpy", rank=communicator.rank))
    values = initial()
    views = Views()
    layout = plan_layout(
        [ParamSpec(fqn, SHAPES[fqn], dtype) for fqn in reversed(SHAPES)],
        world_size=communicator.world_size,
        max_bucket_numel=bucket_numel,
    )
    offloaded = frozenset(bucket.index for bucket in layout.buckets) if tier else frozenset()
    step = ZeroStep(
        layout,
        ZeroPolicy.of_stage(stage),
        step_policy,
        StatePlacement(device, tier or device, offloaded),
        optimizer or Adam(),
        [GROUP],
        communicator,
        accelerator,
        lambda fqn: accelerator.wrap(values[fqn].reshape(-1).copy()),
        views,
    )
    return step, views.arrays


def accumulate(step: ZeroStep, found: Arrays, *, is_last: bool = True, factor: float = 1.0) -> None:
    """One backward pass that hands over `found` times `factor`."""
    step.begin_pass(reduce=is_last or step.policy.grads is Placement.SHARDED)
    for fqn, gradient in found.items():
        flat = np.ascontiguousarray(gradient.reshape(-1) * np.float32(factor))
        step.add_gradient(fqn, step.accelerator.wrap(flat))
    step.end_pass()


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


def train_plainly(world: int, micros: int, steps: int, clip: float) -> tuple[Arrays, list[float]]:
    """The same in float64 with AdamW written out (Loshchilov & Hutter 2019, algorithm 2)."""
    params = {fqn: value.astype(np.float64) for fqn, value in initial().items()}
    mean, square = ({fqn: np.zeros(shape) for fqn, shape in SHAPES.items()} for _ in range(2))
    lr, (beta1, beta2), eps, decay = GROUP["lr"], GROUP["betas"], GROUP["eps"], GROUP["weight_decay"]  # type: ignore[misc]
    norms = []
    for number in range(steps):
        total: Arrays = {}
        for rank in range(world):
            for micro in range(micros):
                for fqn, value in gradients(params, *batch(number, micro, rank))[1].items():
                    total[fqn] = total.get(fqn, 0.0) + value / (world * micros)
        norms.append(float(np.sqrt(sum((value**2).sum() for value in total.values()))))
        factor = min(1.0, clip / norms[-1]) if clip else 1.0
        for fqn, value in total.items():
            mean[fqn] = beta1 * mean[fqn] + (1 - beta1) * value * factor
            square[fqn] = beta2 * square[fqn] + (1 - beta2) * (value * factor) ** 2
            root = np.sqrt(square[fqn] / (1 - beta2 ** (number + 1)))
            update = mean[fqn] / (1 - beta1 ** (number + 1)) / (root + eps)
            params[fqn] = params[fqn] * (1 - lr * decay) - lr * update
    return params, norms


def check_without_torch() -> None:
    """Train at every stage and compare, in a process that must not load torch."""
    import sys

    from polyaccel.testkit.threads import run_threads

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
