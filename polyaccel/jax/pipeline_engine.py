"""The engine of a list of JAX functions over stages: it runs the program of its stage, by whatever table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.core.types import DType
from polyaccel.errors import CommError, PolyaccelError
from polyaccel.jax.carried_state import CarriedState, ViewsState
from polyaccel.jax.pipeline import ArrayExchange, ChunkProgram, ForwardPass, is_float, pair_of
from polyaccel.jax.pipeline_stages import StageCut
from polyaccel.jax.program.batches import as_inputs, as_weak, cast_floats, is_weak
from polyaccel.jax.program.calls import engine_call
from polyaccel.jax.program.carried import StateForm
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.jax.views import array_over
from polyaccel.jax.views_engine import ViewsEngine
from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.messages import StageMessage, StageReceive, StageSend
from polyaccel.pipeline.program import TaskTime, program_of, spans_of, with_stages
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTable, PipelineTask

_FORWARD, _WEIGHT = PipelineOp.FORWARD, PipelineOp.BACKWARD_WEIGHT
_INPUT = PipelineOp.BACKWARD_INPUT


@dataclass
class _Passing:
    """A micro-batch in a chunk: the leaves that came in, the forward pass, the leaves that went out, the gradients of
    these, those of what came in, and those of parameters that wait for their task."""

    inputs: list[Any] = field(default_factory=list)
    made: ForwardPass | None = None
    outputs: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    of_inputs: list[Any] = field(default_factory=list)
    of_params: list[Any] = field(default_factory=list)


class JaxPipelineEngine(ViewsEngine):
    """JAX engine of one pipeline stage of a list of layers, with ZeRO over the ranks of that stage.

    `train_batch` does a step, `eval_batch` computes a loss. `params` has the trees of this stage's layers, and None for
    those of others.
    """

    def __init__(self, rewrites: RewriteContext, cut: StageCut) -> None:
        table, runtime, mine = cut.table, rewrites.runtime, rewrites.params
        self._stage = cut.stage
        self.parts = cut.parts
        """The layers of each chunk."""
        self._placement, self._stages, self._layers = table.placement, table.stages, cut.layers
        self._shapes_of_params, self._state_clashes = cut.shapes_of_params, cut.state_clashes
        super().__init__(rewrites)
        self._line = runtime.process_group_for(("pipe",))
        self._exchange = ArrayExchange(self._line, self.accelerator)
        self._table_for = cut.table_for
        self._follow(table)
        self._chunks = {
            chunk: _Chunk(self, mine, part)
            for chunk, (at, part) in enumerate(zip(table.placement, self.parts, strict=True))
            if at == self._stage
        }
        self._between: dict[Any, list[Any]] = {}
        """The leaves that each chunk gives, as shapes, by the shapes of a micro-batch."""
        self._passing: dict[tuple[int, int], _Passing] = defaultdict(_Passing)
        self.task_times: list[TaskTime] = []
        """When this stage did the tasks of the last batch, in order."""
        if self._recorder.trace is not None:
            self._recorder.trace.add_source(lambda: spans_of(self.task_times))

    def _follow(self, table: PipelineTable) -> None:
        """Do steps by `table` from now on. Raises PipelineError where a state would meet micro-batches out of order."""
        for chunk in range(len(table.placement)):
            forwards = [
                one.micro_batch for one in table.tasks[self._stage] if one.op is _FORWARD and one.chunk == chunk
            ]
            if self._carried is not None and forwards != sorted(forwards):
                raise PipelineError(
                    f"chunk {chunk} takes micro-batches in the order {forwards}, and its layers carry a state",
                    hint="use a table whose forward passes are in order",
                    value=forwards,
                )
        self._micro_batch_count = table.micro_batches
        self._training = program_of(check_table(table)[self._stage])
        self._evaluation = program_of(check_table(table.forwards())[self._stage])
        self._count_of_passes = sum(task.op in (PipelineOp.BACKWARD, _WEIGHT) for task in table.tasks[self._stage])

    def _check_accumulation(self, steps: int) -> None:
        self._table_for(steps)

    def _traced(self, batch: Any) -> Any:
        """That of the whole model, not of this stage."""
        state = [None if form is None else form.tree(form.zeros()) for form in self._layers.forms]
        given = (self._shapes_of_params, *([state] if state else []), batch, jax.random.key(0))
        return jax.make_jaxpr(self._layers)(*given)

    def _carry(self, form: StateForm, first: Any) -> CarriedState:
        """The state of this stage's layers, which its ranks reduce."""
        ranks = self._stage_runtime.communicator
        carried = ViewsState(form, first, self._rewrites.state_reduction, ranks, self._device)
        carried.clashes = self._state_clashes
        return carried

    @property
    def _state(self) -> list[Any]:
        return [] if self._carried is None else self._carried.data

    def is_first_stage(self) -> bool:
        """Return whether this rank's stage has the first layers."""
        return self._placement[0] == self._stage

    def is_last_stage(self) -> bool:
        """Return whether this rank's stage has the last layers, and the loss."""
        return self._placement[-1] == self._stage

    def grad_step(self, batch: Any) -> jax.Array:
        """Raises PolyaccelError: a stage does not have a loss."""
        raise self._alone("engine.grad_step(...)")

    def value_and_grad(self, batch: Any, params: Any = None, *, rng: Any = None) -> tuple[jax.Array, Any]:
        """Raises PolyaccelError: a stage does not have a loss."""
        raise self._alone("engine.value_and_grad(...)")

    def apply_gradients(self, gradients: Any, loss: Any = None) -> None:
        """Raises PolyaccelError: `value_and_grad` gives none."""
        raise self._alone("engine.apply_gradients(...)")

    def program(self, batch: Any) -> jax.stages.Compiled:
        """Raises PolyaccelError: a stage has a program for each of its chunks."""
        raise self._alone("engine.program(...)")

    def _alone(self, call: str) -> PolyaccelError:
        return PolyaccelError(
            f"{call}: this rank has stage {self._stage} of {self._stages} alone",
            hint="call engine.train_batch(data) or engine.eval_batch(data) on every rank",
            value=self._stage,
        )

    @engine_call
    def train_batch(self, data_iter: Any = None) -> jax.Array:
        """Run one optimizer step over its micro-batches. `aux` is set on the last stage.

        Args:
            data_iter: Yields pairs (inputs, labels), the same ones on every stage.

        Returns:
            Mean loss of the micro-batches, on every stage.
        """
        self._require_own_process()
        self._require_optimizer()
        self._settle_params()
        loss = jnp.mean(self._do_steps(self._pairs(data_iter), trains=True))
        for _ in range(self.gradient_accumulation_steps() - 1):
            self.counters.advance()
        self._losses[:] = [loss]
        self.step()
        return loss

    @engine_call
    def eval_batch(self, data_iter: Any) -> jax.Array:
        """Compute the loss of as many micro-batches as a step has, with None for the random key.

        Args:
            data_iter: Yields pairs (inputs, labels), the same ones on every stage.

        Returns:
            Mean loss, on every stage.
        """
        self._require_own_process()
        self._settle_params()
        return jnp.mean(self._do_steps(self._pairs(data_iter), trains=False))

    def destroy(self) -> None:
        """As that of `ViewsEngine`. Every rank calls it."""
        super().destroy()
        self._stage_runtime.leave_groups()
        self.runtime.leave_groups()

    def _pairs(self, data: Any) -> list[tuple[Any, Any]]:
        cast = jnp.float16 if self.runtime.casts_inputs else None
        found = []
        for batch in self._micro_batches(data):
            inputs, labels = pair_of(as_inputs(batch, self._device))
            found.append((inputs if cast is None else cast_floats(inputs, cast), labels))
        return found

    def _do_steps(self, batches: Sequence[tuple[Any, Any]], *, trains: bool) -> jax.Array:
        """Do the steps of training or of evaluation. Gives the losses of the micro-batches, on every stage."""
        if self._micro_batch_count != len(batches):
            self._follow(self._table_for(len(batches)))
        program = self._training if trains else self._evaluation
        if trains:
            self._checks.require_scalable(batches[0])
        shapes = [self._shapes(inputs, labels, trains=trains) for inputs, labels in batches]
        losses: dict[int, Any] = {}
        self._passing.clear()
        self.task_times.clear()
        self._left = self._count_of_passes
        at = "the first step"
        try:
            for step, at, begins in program:
                if isinstance(step, (StageSend, StageReceive)):
                    self._move(step, at, shapes[step.message.micro_batch])
                    continue
                if begins is not None:
                    message, label = begins
                    self._exchange.begin(message, _expected(message, shapes[message.micro_batch]), label)
                began_s = perf_counter()
                if step.op is _FORWARD:
                    self._do_forward(step, batches[step.micro_batch], losses, trains=trains)
                else:
                    self._do_backward(step)
                self.task_times.append(TaskTime(step, began_s, perf_counter()))
            self._exchange.settle()
            return self._from_last_stage([losses[micro_batch] for micro_batch in sorted(losses)])
        except CommError as error:
            self._exchange.forget()
            raise with_stages(error, at, self._stage, self._line.ranks) from error
        finally:
            self._passing.clear()

    def _shapes(self, inputs: Any, labels: Any, *, trains: bool) -> list[Any]:
        """The values that chunks give, as shapes: derived on every stage, from the functions alone."""
        leaves, structure = jax.tree.flatten((inputs, labels))
        key = (structure, tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves), trains)
        if key not in self._between:
            of_layers = self._layers.shapes(self._shapes_of_params, inputs, labels, trains=trains)
            self._between[key] = [of_layers[part[-1]] for part in self.parts]
        return self._between[key]

    def _move(self, step: StageSend | StageReceive, label: str, shapes: Sequence[Any]) -> None:
        message = step.message
        _, micro_batch, chunk, *_ = message
        if isinstance(step, StageSend):
            here = self._passing[micro_batch, chunk]
            if message.op is _FORWARD:
                self._exchange.send(message, here.outputs, label)
            else:
                self._exchange.send(message, here.of_inputs, label)
                here.of_inputs = []
            return
        expected = _expected(message, shapes)
        arrays = self._exchange.receive(message, expected, label)
        arrays = [as_weak(array) if is_weak(shape) else array for array, shape in zip(arrays, expected, strict=True)]
        if message.op is _FORWARD:
            self._passing[micro_batch, chunk + 1].inputs = arrays
        else:
            self._passing[micro_batch, chunk - 1].gradients = arrays

    def _is_here(self, chunk: int) -> bool:
        return 0 <= chunk < len(self._placement) and self._placement[chunk] == self._stage

    def _do_forward(self, task: PipelineTask, batch: tuple[Any, Any], losses: dict[int, Any], *, trains: bool) -> None:
        _, micro_batch, chunk = task
        here, (value, labels) = self._passing[micro_batch, chunk], batch
        if chunk:
            if self._is_here(chunk - 1):
                here.inputs = self._passing[micro_batch, chunk - 1].outputs
            structure = jax.tree.structure(self._shapes(*batch, trains=trains)[chunk - 1])
            value, here.inputs = jax.tree.unflatten(structure, here.inputs), []
        labels = labels if chunk + 1 == len(self._placement) else None
        own = self._chunks[chunk]
        with self.timer("forward" if trains else "data"):
            if trains:
                rng = jax.random.fold_in(self._key, self.counters.micro_steps + micro_batch)
                here.made = own.program.forward(own.leaves(), value, labels, rng, self._loss_factor, self._state)
                result = here.made.result
                if self._carried is not None:
                    self._carried.data = here.made.state
            else:
                result = own.program.evaluate(own.leaves(), value, labels, self._state)
        if chunk + 1 == len(self._placement):
            losses[micro_batch], self.aux = result
        else:
            here.outputs = jax.tree.leaves(result)
        if not trains:
            self._passing.pop((micro_batch, chunk - 1), None)

    def _do_backward(self, task: PipelineTask) -> None:
        op, micro_batch, chunk = task
        here = self._passing[micro_batch, chunk]
        if op is not _WEIGHT:
            if self._is_here(chunk + 1):
                here.gradients = self._passing[micro_batch, chunk + 1].of_inputs
            made, here.made, here.outputs = here.made, None, []
            assert made is not None  # the forward pass was before
            with self.timer("backward"):
                here.of_params, here.of_inputs = self._chunks[chunk].program.backward(made, here.gradients)
            here.gradients = []
        if op is not _INPUT:
            gradients, here.of_params = here.of_params, []
            self._hand_over(self._chunks[chunk].trained, gradients)

    def _hand_over(self, names: Sequence[str], gradients: Sequence[jax.Array]) -> None:
        """Give the step the gradients of a chunk's parameters for a micro-batch."""
        self._left -= 1
        reduces = self.zero.policy.reduces_pass(is_last=not self._left)
        concerned = None if len(self._chunks) == 1 else frozenset(names)
        self.zero.begin_backward(reduce=reduces, names=concerned)
        try:
            with self.timer("reduce"):
                for fqn, gradient in zip(reversed(names), reversed(gradients), strict=True):
                    self.zero.reducer.add_gradient(fqn, self.accelerator.import_array(gradient))
                self.zero.reducer.end_backward()
                self.accelerator.synchronize()  # JAX has its gradients' memory back from here on
        except BaseException:
            self.zero.reducer.abort_backward()
            raise

    def _from_last_stage(self, losses: Sequence[Any]) -> jax.Array:
        """The losses of the micro-batches, on every stage."""
        count = self.gradient_accumulation_steps()
        values = self.accelerator.allocate(count, DType.FLOAT32)
        if losses:
            values.copy_from(self.accelerator.import_array(jnp.stack(losses).astype(jnp.float32)))
        self._line.broadcast(values, self._placement[-1], label="losses")
        return array_over(values, (count,), "the losses")


class _Chunk:
    """A chunk of this stage: its program, and its parameters among those of the stage."""

    def __init__(self, engine: JaxPipelineEngine, params: Sequence[Any], part: range) -> None:
        self._adapter = engine.adapter
        names = [(leaf.fqn, leaf.is_trained) for leaf in engine.adapter.leaves()]
        self._at = [at for at, (fqn, _) in enumerate(names) if int(fqn.partition(".")[0]) in part]
        self.trained = [names[at][0] for at in self._at if names[at][1]]
        """The names of its trained parameters, in tree order."""
        self.program = ChunkProgram(
            engine._layers,
            part,
            [tree if index in part else None for index, tree in enumerate(params)],
            [names[at][1] for at in self._at],
            engine._loss_function.check,
            None if engine._carried is None else engine._carried.form,
        )

    def leaves(self) -> list[jax.Array]:
        """Its parameters, up to date."""
        arrays = self._adapter.views.arrays()
        return [arrays[at] for at in self._at]


def _expected(message: StageMessage, shapes: Sequence[Any]) -> list[Any]:
    """The shapes of a message's arrays, from those of the values that chunks give."""
    if message.op is _FORWARD:
        return list(jax.tree.leaves(shapes[message.chunk]))
    return [leaf for leaf in jax.tree.leaves(shapes[message.chunk - 1]) if is_float(leaf)]
