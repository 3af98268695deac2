"""Training without a framework: a small network whose gradients are written out, on the ZeRO step, and in float64.

Gradients are computed on the host; everything else happens on the communicator's accelerator, in its buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.offload.device import DeviceTier
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.ops.reference import to_float64
from polyaccel.testkit.comparison import same_numbers
from polyaccel.testkit.progress import doing
from polyaccel.zero.buckets.param_listener import ParamListener
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.bucket_plan import plan_step
from polyaccel.zero.plan.layout import plan_layout
from polyaccel.zero.plan.placement import Offload, Place
from polyaccel.zero.plan.policy import Placement, StepPolicy, ZeroPolicy
from polyaccel.zero.resources import Communicators, StepResources, Tiers
from polyaccel.zero.update.named_optimizers import slice_optimizer
from polyaccel.zero.update.optimizers import SliceOptimizer

Arrays = dict[str, npt.NDArray[Any]]
SHAPES: Mapping[str, tuple[int, ...]] = {"w1": (5, 41), "b1": (41,), "w2": (41,), "scale": (), "idle": (3,)}
LR, BETAS, EPS, WEIGHT_DECAY = 0.05, (0.9, 0.99), 1e-8, 0.01
GROUP: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
STAGES = (0, 1, 2, 3)
_SMALL_BUCKET = 64  # elements, far below what there is: many buckets, some of a single parameter
_CLIP = 0.5


def initial() -> Arrays:
    """Float32 values of every parameter, always the same."""
    random = np.random.default_rng(0)
    return {fqn: np.asarray(random.normal(size=shape), dtype=np.float32) for fqn, shape in SHAPES.items()}


def batch(step: int, micro: int, rank: int) -> tuple[Any, Any]:
    """The inputs and targets of one micro-batch, a function of where it stands."""
    random = np.random.default_rng([step, micro, rank])
    return random.normal(size=(6, 5)).astype(np.float32), random.normal(size=6).astype(np.float32)


def gradients(params: Mapping[str, Any], inputs: Any, targets: Any) -> tuple[float, Arrays]:
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


def make_step(
    communicator: Communicator,
    stage: int,
    step_policy: StepPolicy,
    owner: ParamListener,
    *,
    bucket_numel: int,
    dtype: DType = DType.FLOAT32,
    optimizer: SliceOptimizer | None = None,
    tier: Tier | None = None,
    micro_batches: int = 1,
) -> ZeroEngine:
    """A step over the problem's parameters. All states rest in `tier`, which is open; None: on the device."""
    accelerator = communicator.accelerator
    device = DeviceTier()
    device.open(accelerator, accelerator, TierOptions(run_id="testkit", rank=communicator.rank))
    optimizer = optimizer or slice_optimizer("Adam")
    layout = plan_layout(
        [ParamSpec(fqn, SHAPES[fqn], dtype) for fqn in reversed(list(SHAPES))],
        mesh=Mesh.flat(communicator.world_size),
        max_bucket_numel=bucket_numel,
    )
    offload, tiers = Offload(), Tiers.around(device)
    if tier is not None:
        place = Place.HOST if tier.is_resident else Place.NVME
        places = {bucket.index: place for bucket in layout.buckets}
        offload = Offload(places, is_remote=tier.compute is not accelerator)
        tiers = Tiers.around(device, {place: tier})
    plan = plan_step(
        layout,
        ZeroPolicy.of_stage(stage),
        step_policy,
        state_names=optimizer.state_names,
        micro_batches=micro_batches,
        offload=offload,
    )
    parts = StepResources(accelerator, Communicators.plain(communicator), tiers)
    return ZeroEngine(plan, parts, owner, optimizer, [GROUP])


@dataclass(frozen=True)
class Trained:
    """Parameters, the loss before each step, and the gradient norm of each."""

    params: Arrays
    losses: list[float]
    norms: list[float]


class InitialParams(ParamListener):
    """The problem's parameters before training, for the device of `communicator`."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._values = initial()

    def read_param(self, fqn: str) -> Buffer:
        return _on_device(self._communicator, self._values[fqn])


class Parameters(InitialParams):
    """The problem's parameters wherever the step keeps them at present."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._views: dict[str, Buffer] = {}

    def on_bound(self, fqn: str, view: Buffer) -> None:
        self._views[fqn] = view

    def on_freed(self, fqn: str) -> None:
        self._views.pop(fqn, None)

    def read(self) -> Arrays:
        """Every parameter's values, on the host, in float32."""
        values = {fqn: to_float64(view.to_bytes(), view.dtype) for fqn, view in self._views.items()}
        return {fqn: array.reshape(SHAPES[fqn]).astype(np.float32) for fqn, array in values.items()}


def train(communicator: Communicator, stage: int, steps: int) -> Trained:
    """`steps` steps of AdamW with clipping at `stage`, each on one micro-batch a rank."""
    doing(f"training at stage {stage}")
    params = Parameters(communicator)
    step = make_step(communicator, stage, StepPolicy(clip_norm=_CLIP), params, bucket_numel=_SMALL_BUCKET)
    buckets = [bucket.index for bucket in step.layout.buckets]
    is_sharded = step.policy.params is Placement.SHARDED
    losses, norms = [], []

    def unsharded() -> Arrays:
        step.params.wait_all_gathers()
        if not is_sharded:
            return params.read()
        for index in buckets:
            step.params.unshard(index)
        values = params.read()
        for index in buckets:
            step.params.reshard(index)
        return values

    for number in range(steps):
        loss, found = gradients(unsharded(), *batch(number, 0, communicator.rank))
        losses.append(float(np.mean(communicator.all_gather_object(float(loss)))))
        step.begin_backward(reduce=True)
        for fqn, gradient in found.items():
            step.reducer.add_gradient(fqn, _on_device(communicator, gradient))
        if is_sharded:
            for index in buckets:
                step.unsharder.release(index)
        step.reducer.end_backward()
        norms.append(float(step.update([GROUP]).grad_norm or 0.0))
    final = unsharded()
    step.close()
    return Trained(final, losses, norms)


def train_plainly(world: int, micros: int, steps: int, clip: float) -> tuple[Arrays, list[float]]:
    """The same in float64 with AdamW written out (Loshchilov & Hutter 2019, algorithm 2): parameters and norms."""
    params = {fqn: value.astype(np.float64) for fqn, value in initial().items()}
    mean, square = ({fqn: np.zeros(shape) for fqn, shape in SHAPES.items()} for _ in range(2))
    beta1, beta2 = BETAS
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
            update = mean[fqn] / (1 - beta1 ** (number + 1)) / (root + EPS)
            params[fqn] = params[fqn] * (1 - LR * WEIGHT_DECAY) - LR * update
    return params, norms


def check_stages(communicator: Communicator, steps: int) -> None:
    """Train at every stage: within rounding of float64, and bitwise equal where reductions are deterministic."""
    wanted, norms = train_plainly(communicator.world_size, 1, steps, _CLIP)
    runs = {stage: train(communicator, stage, steps) for stage in STAGES}
    for stage, run in runs.items():
        same_numbers(run.norms, norms, f"gradient norms by step, stage {stage}", rtol=1e-4)
        for fqn, values in run.params.items():
            same_numbers(values, wanted[fqn], f"{fqn} after training at stage {stage}", atol=1e-4)
        same_numbers(run.params["idle"], initial()["idle"], f"idle, which has no gradient, at stage {stage}")
        if communicator.deterministic:
            _same(stage, "losses", run.losses, runs[0].losses)
            for fqn, values in run.params.items():
                _same(stage, fqn, values, runs[0].params[fqn])


def _same(stage: int, what: str, found: Any, expected: Any) -> None:
    same_numbers(found, expected, f"{what} at stage {stage} against stage 0, bit for bit")


def _on_device(communicator: Communicator, values: npt.NDArray[Any]) -> Buffer:
    """The values in float32, as a flat buffer."""
    buffer = communicator.accelerator.allocate(values.size, DType.FLOAT32)
    buffer.from_bytes(np.ascontiguousarray(values, dtype=np.float32).tobytes())
    return buffer
