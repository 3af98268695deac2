"""A stage's steps as the engine does them: receives that begin early are in order, each once, and of a known length."""

from __future__ import annotations

import pytest

from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.messages import StageReceive, StageSend
from polyaccel.pipeline.program import program_of
from polyaccel.pipeline.schedules import make_table
from polyaccel.pipeline.table import PipelineOp, PipelineTask


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "inference"])
@pytest.mark.parametrize("stages", [2, 3])
def test_receives_begin_before_the_task_in_front_of_them(schedule: str, stages: int) -> None:
    early = 0
    for steps in check_table(make_table(schedule, stages, 6)):
        program = program_of(steps)
        assert [each.step for each in program] == list(steps)
        begun: list[object] = []
        made = set()
        for position, (step, label, begins) in enumerate(program):
            if begins is not None:
                message, told = begins
                assert isinstance(step, PipelineTask)
                behind = [one.message for one in steps[position:] if isinstance(one, StageReceive)]
                assert behind[0] == message  # all receives before it have ended
                assert message not in begun
                assert told == f"{message}, begun before {step}"
                begun.append(message)
                if message.op is not PipelineOp.FORWARD:
                    assert (message.micro_batch, message.chunk - 1) in made
            if isinstance(step, PipelineTask):
                assert label == str(step)
                if step.op is PipelineOp.FORWARD:
                    made.add(step[1:])
            else:
                after = next((one for one in steps[position:] if isinstance(one, PipelineTask)), "the end of the step")
                assert label == f"{step.message}, then {after}"
        early += len(begun)
        assert len(begun) <= sum(isinstance(one, StageReceive) for one in steps)
        assert any(isinstance(one, (StageSend, StageReceive)) for one in steps)
    assert early
