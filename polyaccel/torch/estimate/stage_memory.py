"""What each stage of a pipeline will hold, before there are ranks: the parts of a model without values, and a
micro-batch's way through them.

Each chunk is measured alone: what its forward pass keeps and needs for a moment, and its backward pass, whole and in
two parts. The schedule's table gives how many micro-batches of which chunk are there at a time, and so what a stage
needs at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polyaccel.accelerators.memory.torch import torch_dtype
from polyaccel.engine.policies.modules import ModuleRules, RecomputePolicy
from polyaccel.pipeline.table import PipelineOp, PipelineTable, live_counts
from polyaccel.planner.model import StageNeeds
from polyaccel.torch.activation_checkpointing.blocks import RecomputedBlocks
from polyaccel.torch.activation_checkpointing.regions import RecomputedRegions
from polyaccel.torch.estimate.activation_memory import (
    LiveMemory,
    Prepare,
    as_in_an_engine,
    autocast_as,
    drop_gradient,
    one_sequence_a_row,
    token_inputs,
)
from polyaccel.torch.estimate.meta_shapes import shape_of_module
from polyaccel.torch.experts.models import are_experts
from polyaccel.torch.pipeline.stage_module import StageModule
from polyaccel.torch.sharding.backward import LaterProduct
from polyaccel.torch.weight_grad import SplitBackwardLinears

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _ChunkNeeds:
    """Bytes of a micro-batch in a chunk beyond what was there before: kept after its forward pass, kept between the two
    parts of a backward pass, the most in a forward and in a backward pass, or in its first part, what was kept
    included; and of the message that the chunk gets."""

    kept: int
    later: int
    forward: int
    backward: int
    first_part: int
    message: int


def estimate_stage_memory(
    build: Callable[[], nn.Module],
    shape: tuple[int, int] | None,
    rules: ModuleRules,
    recompute: RecomputePolicy,
    table: PipelineTable,
    partition_method: str,
    *,
    autocast: str | None = None,
    share: Prepare = lambda _: None,
    spread: Prepare | None = None,
    prepare: Prepare = lambda _: None,
) -> tuple[StageNeeds, ...]:
    """The needs of every stage of the model that `build` makes, which trains by `table`, on micro-batches of `shape`,
    (rows, tokens); without one, of parameters alone. `partition_method` as in the config's section `pipeline`. Ranks
    `share` the layers of the whole model, and what a stage has is `prepare`d to run. `spread` gives parameters the
    shapes that ranks have of them, after which nothing runs: only without a `shape`.

    Raises PipelineError for a model that cannot be cut, PolyaccelError for one that takes no tokens and labels.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), one_sequence_a_row():
        stages, shapes, numels = [], [], None
        if spread is not None:
            model = build()
            share(model)
            spread(model)
            numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
        for stage in range(table.stages):
            model = build().train()
            share(model)
            with _experts_without_values(model) if shape is None else nullcontext():
                cut = StageModule(model, table.placement, stage, partition_method, numels=numels)
            if spread is not None:
                spread(model)
            summary = f"stage {stage} of a {type(model).__name__}"
            shapes.append(shape_of_module(model, summary, rules))
            as_in_an_engine(model, rules)
            cut.place(_CPU, None if rules.param_dtype is None else torch_dtype(rules.param_dtype))
            prepare(model)
            stages.append(cut)
        chunks = None
        if shape is not None:
            ways = [_Way(cut, shape, recompute, autocast) for cut in stages]
            chunks = _chunk_needs(table, ways)
    return tuple(
        StageNeeds(
            tuple(
                f"{part.start}-{part.stop - 1}"
                for at, part in zip(table.placement, cut.parts, strict=True)
                if at == stage
            ),
            shapes[stage],
            max(live_counts(table.tasks[stage])),
            None if chunks is None else _peak_nbytes(table, stage, chunks),
        )
        for stage, cut in enumerate(stages)
    )


@contextmanager
def _experts_without_values(model: nn.Module) -> Iterator[None]:
    """Make experts use all their weights: which ones tokens choose depends on absent values."""
    found = [module for module in model.modules() if are_experts(module)]
    for module in found:
        module.__dict__["forward"] = partial(_of_all_weights, module)
    try:
        yield
    finally:
        for module in found:
            module.__dict__.pop("forward", None)


def _of_all_weights(module: nn.Module, hidden: Tensor, *chosen: Any) -> Tensor:
    behind = [one for one in chosen if isinstance(one, Tensor) and one.is_floating_point()]
    return hidden + sum(one.sum().to(hidden.dtype) for one in (*module.parameters(), *behind))


class _Way:
    """A stage on which micro-batches are tried."""

    def __init__(self, cut: StageModule, shape: tuple[int, int], policy: RecomputePolicy, autocast: str | None) -> None:
        self.cut = cut
        self._inputs = token_inputs(cut.model, shape)
        self._autocast = autocast
        self._delayed = SplitBackwardLinears(cut.model)
        self._blocks = None
        if policy.recomputes_blocks:
            self._blocks = RecomputedBlocks(cut.model, policy, RecomputedRegions(policy, None), lambda: None)
        lent = [vars(part)[name] for tie in cut.ties.values() for part, name in tie.lent]
        self._held = [*cut.model.parameters(), *cut.model.buffers(), *lent]
        for parameter in cut.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(drop_gradient)  # type: ignore[no-untyped-call]

    def run(
        self, chunk: int, received: Sequence[Tensor | None], *, splits: bool
    ) -> tuple[list[int], list[Tensor | None]]:
        """Bytes kept after forward, the most in it, kept after backward, the most in it; and what the chunk gives."""
        is_last = self.cut.parts[chunk].stop == len(self.cut.names)
        left: list[LaterProduct] = []
        with LiveMemory(self._held) as live:
            given = [
                None if one is None else torch.empty_like(one).requires_grad_(one.requires_grad) for one in received
            ]
            if self._blocks is not None:
                with autocast_as(self._autocast), self._blocks.forward_pass(tuple(self._inputs.values())):
                    made = self.cut.run(lambda: self.cut.model(**self._inputs), chunk, given)
            else:
                with autocast_as(self._autocast):
                    made = self.cut.run(lambda: self.cut.model(**self._inputs), chunk, given)
            outputs: list[Tensor | None] = [made[0]] if is_last else list(made)
            del made
            found = [live.nbytes, live.peak_nbytes]
            live.peak_nbytes = live.nbytes
            roots = [one for one in outputs if one is not None and one.requires_grad]
            gradients = [torch.empty_like(one) for one in roots]
            if splits:
                with self._delayed.defer_weight_grads(left):
                    torch.autograd.backward(roots, gradients)
            else:
                torch.autograd.backward(roots, gradients)
            most = live.peak_nbytes
        passed = [None if one is None else torch.empty_like(one).requires_grad_(one.requires_grad) for one in outputs]
        del outputs, roots, gradients
        return [*found, live.nbytes, most], passed


def _chunk_needs(table: PipelineTable, stages: Sequence[_Way]) -> list[_ChunkNeeds]:
    """The needs of all chunks, which a micro-batch passes one after the other."""
    splits = any(task.op is PipelineOp.BACKWARD_INPUT for tasks in table.tasks for task in tasks)
    found, received = [], list[Tensor | None]()
    for chunk, stage in enumerate(table.placement):
        (kept, forward, after, backward), passed = stages[stage].run(chunk, received, splits=False)
        later, first_part = after, backward
        if splits:
            (_, _, later, first_part), passed = stages[stage].run(chunk, received, splits=True)
        message = sum(one.numel() * one.element_size() for one in received if one is not None)
        found.append(_ChunkNeeds(kept, later, forward, backward, first_part, message))
        received = passed
    return found


def _peak_nbytes(table: PipelineTable, stage: int, chunks: Sequence[_ChunkNeeds]) -> int:
    """The most bytes of a stage, whose next message may have begun to come."""
    held = peak = 0
    for op, _, chunk in table.tasks[stage]:
        needs = chunks[chunk]
        if op is PipelineOp.FORWARD:
            peak = max(peak, held + needs.forward)
            held += needs.kept
        elif op is PipelineOp.BACKWARD_WEIGHT:
            held -= needs.later
        else:
            is_whole = op is PipelineOp.BACKWARD
            peak = max(peak, held - needs.kept + (needs.backward if is_whole else needs.first_part))
            held += (0 if is_whole else needs.later) - needs.kept
    return peak + max(needs.message for needs in chunks)
