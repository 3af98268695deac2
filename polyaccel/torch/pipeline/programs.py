"""The programs of a stage for any number of micro-batches: of a training step, and of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.messages import message_of
from polyaccel.pipeline.program import ProgramStep, program_of
from polyaccel.pipeline.select import evaluation_table, select_schedule
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTable
from polyaccel.torch.sharding.units import parts_of_parameters


@dataclass(frozen=True)
class StageProgram:
    """What a stage does in a batch."""

    steps: tuple[ProgramStep, ...]
    micro_batches: int
    backward_passes: int = 0
    """How many backward passes give gradients to parameters."""
    splits: bool = False
    """Whether backward passes are in two parts."""
    ends_with_message: bool = False


class StagedModule(Protocol):
    """A model over stages."""

    num_stages: int
    stage: int
    schedule: str | None
    chunks: int
    placement: tuple[int, ...]


def names_by_chunk(model: nn.Module, names: Iterable[str], module: StagedModule) -> dict[int, set[str]] | None:
    """The parameters of `names` that each chunk of this stage may give gradients to; None where there is but one chunk.
    A parameter that `model` does not assign is every chunk's."""
    chunks = [chunk for chunk, stage in enumerate(module.placement) if stage == module.stage]
    if len(chunks) == 1:
        return None
    known, all_chunks = parts_of_parameters(model), " ".join(map(str, chunks))
    users = {name: (known.get(name) or all_chunks).split() for name in names}
    return {chunk: {name for name in users if str(chunk) in users[name]} for chunk in chunks}


class StagePrograms:
    """The programs of a stage of `module` by `schedule`, of `chunks` a stage (0: what that needs). Where the config has
    its default, the schedule is the module's."""

    def __init__(self, module: StagedModule, schedule: str, chunks: int) -> None:
        if module.schedule is not None and schedule == "1f1b":
            schedule, chunks = module.schedule, module.chunks
        elif module.num_stages == 1 and module.schedule is None:
            schedule, chunks = "1f1b", 0  # one rank does all, whatever the order
        self._module = module
        self._schedule, self._chunks = schedule, chunks
        self._trainings: dict[int, StageProgram] = {}
        self._evaluations: dict[int, StageProgram] = {}

    def table(self, micro_batches: int) -> PipelineTable:
        """The table of a training step. Raises PipelineError for a schedule for which the model was not cut."""
        return self._table(select_schedule, micro_batches)

    def training(self, micro_batches: int) -> StageProgram:
        """What the stage does in a training step of so many micro-batches."""
        if micro_batches not in self._trainings:
            table, stage = self.table(micro_batches), self._module.stage
            tasks = table.tasks[stage]
            self._trainings[micro_batches] = StageProgram(
                program_of(check_table(table)[stage]),
                micro_batches,
                backward_passes=sum(task.op in (PipelineOp.BACKWARD, PipelineOp.BACKWARD_WEIGHT) for task in tasks),
                splits=any(task.op is PipelineOp.BACKWARD_INPUT for task in tasks),
                ends_with_message=message_of(tasks[-1], table.placement) is not None,
            )
        return self._trainings[micro_batches]

    def evaluation(self, micro_batches: int) -> StageProgram:
        """What the stage does in an evaluation of so many micro-batches."""
        if micro_batches not in self._evaluations:
            steps = check_table(self._table(evaluation_table, micro_batches))[self._module.stage]
            self._evaluations[micro_batches] = StageProgram(program_of(steps), micro_batches)
        return self._evaluations[micro_batches]

    def _table(self, make: Callable[..., PipelineTable], micro_batches: int) -> PipelineTable:
        module, schedule, chunks = self._module, self._schedule, self._chunks
        table = make(schedule, module.num_stages, micro_batches, chunks or None)
        if table.placement != module.placement:
            also = f", chunks={chunks}" if chunks else ""
            raise PipelineError(
                f"the chunks of {schedule} are on the stages {list(table.placement)}, those of the PipelineModule on "
                f"{list(module.placement)}",
                hint=f"make it for that schedule: PipelineModule(..., schedule={schedule!r}{also})",
                value=module.placement,
            )
        return table
