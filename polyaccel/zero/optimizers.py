"""Optimizers on slices: what the step updates is a `Shard` of flat buffers, never a tensor with a shape.

An elementwise optimizer needs no more than that: one fused kernel call for each run of elements. LAMB scales each
parameter by a ratio of its norms, so it adds the squared norms of all slices over the ranks first.
Hyperparameters come from `groups`, one mapping for each optimizer group, read anew at every step so that learning-rate
schedules need not know about any of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any, ClassVar

from polyaccel.buffer import Buffer
from polyaccel.comm.base import CallInfo, Communicator
from polyaccel.offload.tier import Tier
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    LAMB_APPLY,
    LAMB_DIRECTION,
    LION,
    SGD,
    SQUARE_SUMS,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    LionHyper,
    SgdHyper,
    StochasticRounding,
)
from polyaccel.types import DType
from polyaccel.zero.layout import Bucket, Slice
from polyaccel.zero.norms import allocate_sums, read_sums, sums_in

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [offset, offset + numel) of a shard, updated together; `step` counts their updates with this one.

    `rounding` is that of their parameters of 16 bits, None to nearest.
    """

    offset: int
    numel: int
    step: int
    rounding: StochasticRounding | None = None

    def continues_in(self, later: Run) -> bool:
        """Whether one run can stand for both."""
        is_adjacent = self.offset + self.numel == later.offset
        return is_adjacent and self.step == later.step and self.rounding is None and later.rounding is None


@dataclass(slots=True)
class Shard:
    """What an optimizer sees of one bucket: the elements that this rank updates, in flat buffers of equal length.

    `tier` is where `master` and `states` rest, and whose kernels update them. `grad` has the reduced gradient times the
    loss scale. `out` is where the parameters stand, None when `master` is that memory itself. `slices` are the
    parameters' parts of the shard, `runs` what to update in this step.
    """

    bucket: Bucket
    tier: Tier
    master: Buffer
    out: Buffer | None
    slices: tuple[Slice, ...]
    states: dict[str, Buffer] = field(default_factory=dict)
    grad: Buffer | None = None
    runs: tuple[Run, ...] = ()
    steps: dict[str, int] = field(default_factory=dict)
    """How many updates each parameter of the bucket has had. A parameter without a gradient on any rank has none."""

    def cut(self, run: Run) -> tuple[Buffer, Buffer, Buffer | None, dict[str, Buffer]]:
        """Views (master, gradient, out, states) of a run."""
        assert self.grad is not None  # set by the step for every shard that it passes on
        window = (run.offset, run.numel)
        return (
            self.master.view(*window),
            self.grad.view(*window),
            None if self.out is None else self.out.view(*window),
            {name: state.view(*window) for name, state in self.states.items()},
        )

    def run_of(self, piece: Slice) -> Run | None:
        """The run that updates one of `slices` in this step, as a whole; None if none does."""
        inside = (run for run in self.runs if run.offset <= piece.shard_offset < run.offset + run.numel)
        return next(inside, None)

    def updates(self, piece: Slice) -> bool:
        """Whether one of `slices` is updated in this step."""
        return self.run_of(piece) is not None

    def allocate_state(self, name: str, dtype: DType) -> Buffer:
        """Add a state, zeros, in the shard's tier. Raises OffloadError when there is no room."""
        key = f"bucket{self.bucket.index}.{name}"
        self.states[name] = self.tier.allocate(key, self.master.numel, dtype)
        return self.states[name]

    @property
    def kernels(self) -> KernelTable:
        """Those that reach the shard."""
        return self.tier.compute.kernels()


class SliceOptimizer(ABC):
    """An optimizer that works on shards. `state_names` are its states, each as long as the shard, in float32."""

    state_names: ClassVar[tuple[str, ...]] = ()
    needs_whole_parameters: ClassVar[bool] = False
    """True for an update that must see parameters uncut: usable only where the optimizer states are replicated."""

    def initialise_states(self, states: Mapping[str, Buffer], group: Group) -> None:  # noqa: B027 - zeros suit most
        """Set the states of a new shard, which are zero, to where the optimizer starts."""

    @abstractmethod
    def update(
        self,
        shards: Iterable[Shard],
        groups: Sequence[Group],
        grad_scale: float,
        communicator: Communicator,
    ) -> Iterator[Shard]:
        """Update every shard with its gradient times `grad_scale`; yield each as soon as its parameters are final.

        Collective: every rank passes the same buckets in the same order. A shard's buffers are good until the next one
        is asked for, where its tier is not resident.
        """


class ElementwiseOptimizer(SliceOptimizer):
    """An update that treats every element alike: one kernel call for each run."""

    def update(
        self,
        shards: Iterable[Shard],
        groups: Sequence[Group],
        grad_scale: float,
        communicator: Communicator,
    ) -> Iterator[Shard]:
        for shard in shards:
            for run in shard.runs:
                self.update_run(shard, run, groups[shard.bucket.kind.group], grad_scale)
            yield shard

    @abstractmethod
    def update_run(self, shard: Shard, run: Run, group: Group, grad_scale: float) -> None: ...


class Adam(ElementwiseOptimizer):
    """Adam and AdamW. Group keys: lr, betas, eps, weight_decay, and optionally decoupled and bias_correction."""

    state_names = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def hyper(group: Group, step: int) -> AdamHyper:
        """What update number `step` of a parameter in `group` needs."""
        return _adam_hyper(group, step)

    def update_run(self, shard: Shard, run: Run, group: Group, grad_scale: float) -> None:
        master, grad, out, states = shard.cut(run)
        hyper = self.hyper(group, run.step)
        exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
        shard.kernels[ADAM](master, grad, exp_avg, exp_avg_sq, out, hyper, grad_scale, run.rounding)


class Sgd(ElementwiseOptimizer):
    """SGD with momentum. Group keys: lr, momentum, dampening, weight_decay, nesterov."""

    state_names = ("momentum_buffer",)

    @staticmethod
    def hyper(group: Group, step: int) -> SgdHyper:
        """As `Adam.hyper`."""
        return SgdHyper(
            lr=float(group["lr"]),
            momentum=float(group.get("momentum", 0.0)),
            dampening=float(group.get("dampening", 0.0)),
            weight_decay=float(group.get("weight_decay", 0.0)),
            nesterov=bool(group.get("nesterov", False)),
            first=step == 1,
        )

    def update_run(self, shard: Shard, run: Run, group: Group, grad_scale: float) -> None:
        master, grad, out, states = shard.cut(run)
        hyper = self.hyper(group, run.step)
        average = states["momentum_buffer"] if hyper.momentum else None
        shard.kernels[SGD](master, grad, average, out, hyper, grad_scale, run.rounding)


class Adagrad(ElementwiseOptimizer):
    """Adagrad. Group keys: lr, eps, weight_decay, lr_decay, initial_accumulator_value."""

    state_names = ("sum",)

    def initialise_states(self, states: Mapping[str, Buffer], group: Group) -> None:
        states["sum"].fill(float(group.get("initial_accumulator_value", 0.0)))

    @staticmethod
    def hyper(group: Group, step: int) -> AdagradHyper:
        """As `Adam.hyper`."""
        return AdagradHyper(
            lr=float(group["lr"]),
            eps=float(group.get("eps", 1e-10)),
            weight_decay=float(group.get("weight_decay", 0.0)),
            lr_decay=float(group.get("lr_decay", 0.0)),
            step=step,
        )

    def update_run(self, shard: Shard, run: Run, group: Group, grad_scale: float) -> None:
        master, grad, out, states = shard.cut(run)
        hyper = self.hyper(group, run.step)
        shard.kernels[ADAGRAD](master, grad, states["sum"], out, hyper, grad_scale, run.rounding)


class Lion(ElementwiseOptimizer):
    """Lion. Group keys: lr, betas, weight_decay."""

    state_names = ("exp_avg",)

    @staticmethod
    def hyper(group: Group, step: int) -> LionHyper:
        """As `Adam.hyper`; the number of the update does not matter."""
        beta1, beta2 = group["betas"]
        return LionHyper(float(group["lr"]), float(beta1), float(beta2), float(group.get("weight_decay", 0.0)))

    def update_run(self, shard: Shard, run: Run, group: Group, grad_scale: float) -> None:
        master, grad, out, states = shard.cut(run)
        hyper = self.hyper(group, run.step)
        shard.kernels[LION](master, grad, states["exp_avg"], out, hyper, grad_scale, run.rounding)


class Lamb(SliceOptimizer):
    """LAMB (You et al. 2020, algorithm 2) with DeepSpeed's bounds on the trust ratio: group keys min_coeff, max_coeff.

    A parameter's norms are over all of it, though it be cut over ranks.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def hyper(group: Group, step: int) -> AdamHyper:
        """As `Adam.hyper`."""
        return _adam_hyper(group, step)

    @staticmethod
    def bounds(group: Group) -> tuple[float, float]:
        """The least and the greatest trust ratio."""
        return float(group.get("min_coeff", 0.01)), float(group.get("max_coeff", 10.0))

    def update(
        self,
        shards: Iterable[Shard],
        groups: Sequence[Group],
        grad_scale: float,
        communicator: Communicator,
    ) -> Iterator[Shard]:
        for shard in shards:
            kernels = shard.kernels
            group = groups[shard.bucket.kind.group]
            direction = shard.tier.compute.allocate(shard.master.numel, DType.FLOAT32)
            for run in shard.runs:
                master, grad, _, states = shard.cut(run)
                kernels[LAMB_DIRECTION](
                    master,
                    grad,
                    states["exp_avg"],
                    states["exp_avg_sq"],
                    direction.view(run.offset, run.numel),
                    self.hyper(group, run.step),
                    grad_scale,
                )
            ratios = self._trust_ratios(shard, direction, group, communicator)
            for piece in shard.slices:
                run_of_piece = shard.run_of(piece)
                if run_of_piece is not None:
                    window = (piece.shard_offset, piece.length)
                    rounding = run_of_piece.rounding
                    kernels[LAMB_APPLY](
                        shard.master.view(*window),
                        direction.view(*window),
                        None if shard.out is None else shard.out.view(*window),
                        float(group["lr"]) * ratios[piece.fqn],
                        rounding and rounding.at(piece.shard_offset - run_of_piece.offset),
                    )
            yield shard

    def _trust_ratios(
        self, shard: Shard, direction: Buffer, group: Group, communicator: Communicator
    ) -> dict[str, float]:
        """`|weights| / |direction|` of each parameter in the bucket, bounded; 1 where either norm is zero."""
        names = [slot.param.fqn for slot in shard.bucket.slots]
        sums = sums_in(shard.tier.compute, 2 * len(names))
        pieces: list[tuple[int, Buffer]] = []
        for piece in shard.slices:
            index = names.index(piece.fqn)
            pieces.append((index, shard.master.view(piece.shard_offset, piece.length)))
            pieces.append((len(names) + index, direction.view(piece.shard_offset, piece.length)))
        shard.kernels[SQUARE_SUMS](sums, pieces)
        if shard.master.numel != shard.bucket.numel:  # cut over ranks
            own, sums = sums, allocate_sums(communicator.accelerator, communicator, 2 * len(names))
            sums.copy_from(own)
            communicator.all_reduce(sums, info=CallInfo("lamb norms", shard.bucket.index))
        values = read_sums(sums)
        low, high = self.bounds(group)
        ratios: dict[str, float] = {}
        for index, fqn in enumerate(names):
            weight, update = sqrt(values[index]), sqrt(values[len(names) + index])
            usable = weight > 0.0 and update > 0.0 and isfinite(weight) and isfinite(update)
            ratios[fqn] = min(max(weight / update, low), high) if usable else 1.0
        return ratios


def _adam_hyper(group: Group, step: int) -> AdamHyper:
    beta1, beta2 = group["betas"]
    return AdamHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group.get("weight_decay", 0.0)),
        step=step,
        decoupled=bool(group.get("decoupled", True)),
        bias_correction=bool(group.get("bias_correction", True)),
    )
