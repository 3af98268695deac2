"""The ZeRO step in native mode: the counterpart of `ZeroEngine` for arrays of JAX on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.errors import PolyaccelError
from polyaccel.jax.native.many_steps import StepAhead, StepsProgram, outcomes, stacked_inputs
from polyaccel.jax.native.memory import NativeMemory
from polyaccel.jax.native.optimizers import SliceUpdate, stacked
from polyaccel.jax.native.program import Gradients, Inputs, Outcome, Recipe
from polyaccel.jax.native.rows import RoundingKeys
from polyaccel.jax.optax_optimizer import OptaxOptimizer, TransformationOptimizer
from polyaccel.zero.plan.layout import Bucket, ShardLayout, Slot
from polyaccel.zero.update.consistency import Consistency
from polyaccel.zero.update.global_norm import GradientNorm
from polyaccel.zero.update.optimizer_step import StepResult
from polyaccel.zero.update.optimizers import Group, SliceOptimizer


class Program(Protocol):
    """The programs of a step, which XLA runs on all devices: `StepProgram` has what they take and give."""

    trained: tuple[Bucket, ...]
    differentiate: Any
    mean_gradients: Any
    take_gradients: Any
    update: Any
    step: Any
    evaluate: Any

    def rounding_keys(self, steps: Mapping[str, int]) -> dict[int, RoundingKeys]:
        """How parameters of 16 bits are rounded after so many updates of each, by bucket; empty: to nearest."""

    def leaves(self, params: Sequence[Any]) -> list[jax.Array]:
        """Copies of the parameters in tree order."""


class UnknownMemory:
    """Memory whose purpose is unknown."""

    def estimated(self) -> tuple[()]:
        return ()

    def measured(self) -> tuple[()]:
        return ()


class NativeStep:
    """Parameters, gradients, optimizer states and their exchange for one layout, on this process's devices.

    A `TrainedState`. `params` holds all arrays between steps. `update_of` is the traced form of `optimizer`.
    """

    def __init__(
        self,
        layout: ShardLayout,
        memory: NativeMemory,
        program: Program,
        optimizer: SliceOptimizer | None,
        update_of: SliceUpdate | None,
        communicator: Communicator,
    ) -> None:
        self.layout = layout
        self.params = memory
        self.optimizer = optimizer
        self.memory = UnknownMemory()
        self._program = program
        self._update_of = update_of
        self._communicator = communicator
        self._gradients: Gradients | None = None
        self._is_incomplete = False
        """Whether a pass failed and its gradients were not discarded."""

    # A step.

    def differentiate(self, batch: Any, micro_steps: int, factor: float) -> tuple[Any, Any]:
        """Return (losses, auxiliary outputs) by device, and add up gradients scaled by `factor`. Collective."""
        self.consistency.require()
        self._is_incomplete, gradients = True, self._gradients
        loss, aux, self._gradients = self._program.differentiate(
            self.params.held.params, gradients, batch, np.uint32(micro_steps), np.float32(factor)
        )
        self._is_incomplete = False
        return loss, aux

    def take_gradients(self, gradients: Sequence[Any]) -> None:
        """Hold gradients of the trained leaves, in tree order, each with an axis over devices. Collective."""
        self.consistency.require()
        self._gradients = self._program.take_gradients(list(gradients))

    def gradients_with(self, last: tuple[Any, int, float] | None) -> Gradients:
        """Copies of the gradients so far, with those of a `last` micro-batch, whose update has not begun: it, the
        number of micro-batches before, and the factor of its loss. Collective."""
        kept = jax.tree.map(jnp.copy, self._gradients)
        if last is None:
            return kept or {}
        batch, micro_steps, factor = last
        given = batch, np.uint32(micro_steps), np.float32(factor)
        found: Gradients = self._program.differentiate(self.params.held.params, kept, *given)[2]
        return found

    def update(self, groups: Sequence[Group], loss_scale: float = 1.0) -> StepResult:
        """Update the slices and publish them, unless an overflow is skipped. Collective."""
        self.consistency.require()
        if self._is_incomplete or self._gradients is None:
            raise PolyaccelError(
                "the gradients are incomplete: a pass failed, or there was none",
                hint="call engine.zero_grad() and start over",
            )
        if isinstance(self.optimizer, TransformationOptimizer):
            self.optimizer.loss_of_ranks = self.optimizer.mean_loss(self._communicator)
        recipe, inputs = self._prepare(groups, loss_scale)
        gradients, self._gradients = self._gradients, None
        with self.params.given_up() as held:
            self.params.held, outcome = self._program.update(recipe, held, gradients, inputs)
            return self._result(_on_host(outcome))

    def step(
        self, batch: Any, micro_steps: int, factor: float, groups: Sequence[Group], loss_scale: float
    ) -> tuple[Any, Any, StepResult]:
        """`differentiate` of the last micro-batch and `update`, as one program, where the update needs no loss."""
        self.consistency.require()
        recipe, inputs = self._prepare(groups, loss_scale)
        gradients, self._gradients = self._gradients, None
        with self.params.given_up() as held:
            arguments = (held, gradients, batch, np.uint32(micro_steps), np.float32(factor), inputs)
            loss, aux, self.params.held, outcome = self._program.step(recipe, *arguments)
            return loss, aux, self._result(_on_host(outcome))

    def many(
        self, program: StepsProgram, batches: Any, state: Any, ahead: Sequence[StepAhead], begin: int
    ) -> tuple[Any, Any, Any, Any, list[StepResult]] | None:
        """Take steps of `program` from `begin` on, up to one whose update is skipped; None where the optimizer is
        compiled otherwise for some of them. Collective.

        Returns (losses, last auxiliary outputs, state, which states differ, results of the steps that were taken).
        """
        self.consistency.require()
        made = [self._prepare(one.groups, one.loss_scale, at) for at, one in enumerate(ahead[begin:], 1)]
        recipe = made[0][0]
        if any(other != recipe for other, _ in made):
            return None
        made = [made[0]] * begin + made
        numbers = self.optimizer.numbers if isinstance(self.optimizer, OptaxOptimizer) else {}
        micro_steps = np.asarray([one.micro_steps for one in ahead], np.uint32)
        factors = [one.factor for one in ahead]
        inputs = stacked_inputs([one for _, one in made], micro_steps, factors, begin, numbers)
        with self.params.given_up() as held:
            self.params.held, losses, aux, state, found, differs = program.run(recipe, held, batches, state, inputs)
            on_host = _on_host(found)
            results = list[StepResult]()
            for one in outcomes(on_host)[begin:]:
                results.append(self._result(one))
                if not results[-1].applied:
                    break
            if isinstance(self.optimizer, OptaxOptimizer):
                self.optimizer.numbers = {name: float(value) for name, value in on_host.numbers.items()}
        return losses, aux, state, differs, results

    def evaluate(self, batch: Any) -> tuple[Any, Any]:
        """(losses, auxiliary outputs) of a micro-batch, of each device. Collective."""
        losses, aux = self._program.evaluate(self.params.held.params, batch)
        return losses, aux

    def program(self, batch: Any, groups: Sequence[Group]) -> jax.stages.Compiled:
        """The compiled program of `step` for a batch like `batch`, where it is the only micro-batch."""
        self.consistency.require()
        recipe, inputs = self._prepare(groups, 1.0)
        arguments = (self.params.for_update(), None, batch, np.uint32(0), np.float32(1.0), inputs)
        return self._program.step.lower(recipe, *arguments).compile()

    def leaves(self) -> list[jax.Array]:
        """Copies of the parameters in tree order."""
        return self._program.leaves(self.params.held.params)

    def _prepare(self, groups: Sequence[Group], loss_scale: float, ahead: int = 1) -> tuple[Recipe, Inputs]:
        """The recipe of an update, the next or one `ahead`, and its inputs: terms once for all buckets that have them
        in common."""
        assert self._update_of is not None  # the engine refuses to train without an optimizer
        after = {fqn: count + ahead for fqn, count in self.steps.items()}
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        terms: list[Any] = []
        indices, variants = [], []
        for bucket in self._program.trained:
            group = groups[bucket.kind.group]
            steps = tuple(after[slot.param.fqn] for slot in bucket.slots)
            steps = steps[:1] if len(set(steps)) == 1 else steps
            key = (bucket.kind.group, steps)
            if key not in known:
                known[key] = len(terms)
                each = [self._update_of.terms(group, step) for step in steps]
                terms.append(each[0] if all(one == each[0] for one in each) else stacked(each))
            indices.append(known[key])
            variants.append(self._update_of.variant(group, bucket))
        loss = self.optimizer.loss_of_ranks if isinstance(self.optimizer, TransformationOptimizer) else 0.0
        inputs = Inputs(terms, self._program.rounding_keys(after), np.float32(loss_scale), np.float32(loss))
        return Recipe(tuple(indices), tuple(variants)), inputs

    def _result(self, found: Outcome) -> StepResult:
        """Count an update whose outcome is on the host."""
        applied, norm = bool(found.applied), float(found.norm)
        if applied:
            for fqn in self.steps:
                self.steps[fqn] += 1
            if isinstance(self.optimizer, OptaxOptimizer) and found.numbers:
                self.optimizer.numbers = {name: float(value) for name, value in found.numbers.items()}
        factor = float(found.clip_factor) if applied else 1.0
        return StepResult(applied, GradientNorm(norm, self._culprit(found.bad)), factor)

    def _culprit(self, bad: Any) -> str | None:
        """The first parameter whose gradient is not finite."""
        for bucket, first in zip(self._program.trained, bad, strict=True):
            inside = [slot.param.fqn for slot in bucket.slots if slot.offset <= first < bucket.numel]
            if inside:
                return inside[-1]
        return None

    # What engines and checkpoints ask.

    @property
    def steps(self) -> dict[str, int]:
        """How many updates each parameter has had."""
        return self.params.steps

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that no update has used yet."""
        return self._gradients is not None or self._is_incomplete

    def discard_gradients(self) -> None:
        """Forget all gradients."""
        self._gradients, self._is_incomplete = None, False

    @property
    def consistency(self) -> Consistency:
        """Whether an update, which gives the arrays up, or a load failed in the middle."""
        return self.params.consistency

    def local_shards(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """Like `ZeroEngine.local_shards`: the pieces that this process saves."""
        self.consistency.require()
        return self.params.local_shards()

    def shards_to_load(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """Yield host buffers like `ZeroEngine.shards_to_load`, for `params.all_gather_masters`."""
        return self.params.shards_to_load()

    def close(self) -> None:
        """Release all arrays."""
        self.discard_gradients()
        self.params.close()


def _on_host(outcome: Outcome) -> Outcome:
    found: Outcome = jax.device_get(jax.tree.map(lambda value: value.addressable_data(0), outcome))
    return found
