"""What stage 3 sends, by the recorder, beside what the plan says.

Gradients travel exactly as planned. Gathers follow the events: the plan keeps the root unsharded all step long, the
engine keeps a bucket for as long as its next use is near, whichever unit it belongs to.
"""

from __future__ import annotations

import pytest
from parity_models import make_config, on_threads
from stage3_models import CASES, Case, Gpt, seeded, token_loss

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.zero.plan.traffic import StepTraffic, step_traffic

WORLD = 3
STEPS = 4
VOTE, VOTE_NBYTES = "what ranks need next", 16
SHARDED = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**9}


class Counting(RecordingCommunicator):
    """Knows the votes from other gathers."""

    votes = 0

    def start(self, collective):
        self.votes += collective.label == VOTE
        return super().start(collective)


def sent(case: Case, accumulation: int, zero: dict) -> tuple[list[dict[str, float]], StepTraffic, int]:
    """Elements that a rank sends in each step, by operation; the plan; and one gather of everything. Votes are counted
    apart, each as one."""

    def work(communicator, model):
        recording = Counting(communicator, watch_s=None)
        set_thread_communicator(recording)
        config = make_config(3, accumulation=accumulation, zero=zero)
        engine = polyaccel.initialize(model=model, config=config)[0]
        layout = engine.zero.layout
        figures = []
        for step in range(STEPS):
            recording.recorder.reset_traffic()
            recording.votes = 0
            for micro in range(accumulation):
                engine.backward(case.loss(engine, step, micro, communicator.rank))
                engine.step()
            figure = dict(recording.recorder.sent_numel)
            if recording.votes:
                figure["all_gather"] -= recording.votes * VOTE_NBYTES * (WORLD - 1)
            figures.append({**figure, "votes": recording.votes})
        once = sum(bucket.numel - bucket.shard_numel for bucket in layout.buckets if not bucket.kind.persistent)
        return figures, step_traffic(engine.zero.plan), once

    return on_threads(WORLD, work, case.build)[0]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("case", ["gpt", "conv", "experts", "lora", "recomputed"])
def test_gradients_travel_as_planned_and_parameters_at_most_twice_a_pass(case, accumulation):
    figures, plan, once = sent(CASES[case], accumulation, SHARDED)
    for figure in figures:
        assert figure["reduce_scatter"] == plan.reduce_scatter_numel
        assert once <= figure["all_gather"] <= 2 * once * accumulation
    assert figures[-1]["all_gather"] <= 1.15 * plan.all_gather_numel
    assert figures[-1] == figures[-2]
    assert figures[-1]["votes"] == 2 * accumulation  # at the end of a forward and of a backward pass


def test_a_block_that_is_recomputed_twice_is_reduced_once():
    """From the second step on; in the first, its second gradient comes as a surprise."""

    class Twice(Gpt):
        def logits(self, tokens):
            hidden = self.embed(tokens).requires_grad_()
            for index in (0, 1, 0, 2):
                hidden = self.run_block(self.blocks[index], hidden)
            return self.head(hidden)

    figures, plan, _ = sent(Case(seeded(lambda: Twice("reentrant")), token_loss), 1, SHARDED)
    assert figures[0]["reduce_scatter"] > plan.reduce_scatter_numel
    assert [figure["reduce_scatter"] for figure in figures[1:]] == [plan.reduce_scatter_numel] * (STEPS - 1)


def test_a_gpt_gathers_exactly_as_planned():
    figures, plan, _ = sent(CASES["gpt"], 1, SHARDED)
    assert figures[-1]["all_gather"] == plan.all_gather_numel


@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_may_be_kept_is_gathered_once_a_step(accumulation):
    keep = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
    figures, _, once = sent(CASES["gpt"], accumulation, {**SHARDED, **keep})
    assert [figure["all_gather"] for figure in figures[1:]] == [once] * (STEPS - 1)


def test_gathering_ahead_gathers_nothing_in_vain():
    figures = [
        sent(CASES["gpt"], 2, {**SHARDED, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": ahead})[0][-1]
        for ahead in (0, 500)
    ]
    assert figures[0] == figures[1]


def test_persistent_parameters_are_published_once():
    figures, plan, once = sent(CASES["gpt"], 1, {"stage3_param_persistence_threshold": 10**9})
    assert once == 0
    assert figures[-1]["all_gather"] == plan.all_gather_numel
    assert figures[-1]["reduce_scatter"] == plan.reduce_scatter_numel
