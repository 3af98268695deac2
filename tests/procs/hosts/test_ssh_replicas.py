"""A job over two hosts whose ranks are killed, or that loses a host with its keeper, goes on from memory."""

from __future__ import annotations

import re
from pathlib import Path

import elastic_job
from host_jobs import Hosts

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 10


def undisturbed(communicator: Communicator, models: list[elastic_job.Model]) -> dict[int, str]:
    """A rank's losses of the run that nobody disturbs."""
    config, found = {**elastic_job.CONFIG, "checkpoint": {}}, {}
    model = models[communicator.rank]
    engine, *_ = polyaccel.initialize(model=model, config=config, training_data=elastic_job.Numbered())
    for step in range(1, STEPS + 1):
        losses = []
        for micro_batch in elastic_job.batches_of(engine):
            loss = engine(*micro_batch)
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        found[step] = str(sum(losses) / len(losses))
    engine.destroy()
    return found


def test_a_rank_that_is_killed_and_a_host_that_is_lost_cost_a_step_at_most(two_hosts: Hosts, tmp_path: Path) -> None:
    """The rank of host2 is killed within step 4; its keeper and it within step 7; then those of host1 within step 9.
    Nothing is ever on a disk, and every loss that any start has printed has the bits of the run without all that."""
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    kills = "0:1:within:4,1:1:lost:7,2:0:lost:9"
    options = ["--hostfile", str(tmp_path / "hosts"), "--restarts", "3", "--grace-period", "2"]
    arguments = (str(tmp_path / "saves"), str(STEPS), kills)
    done = two_hosts.run(Path(elastic_job.__file__), *options, arguments=arguments)
    assert done.returncode == 0, done.stderr
    begins = {tuple(map(int, each)) for each in re.findall(r"begins (\d) (\d+) \d+", done.stdout)}
    first, second, third, fourth = sorted(begins)
    assert (first, second) == ((0, 0), (1, 3))  # the keepers of both hosts live: no step is lost
    assert third in ((2, 5), (2, 6))  # step 6 may have been on its way to host1 yet
    assert fourth in ((3, 7), (3, 8))
    assert not (tmp_path / "saves").exists()

    models = [elastic_job.build() for _ in range(2)]  # not by the ranks: a seed is that of all threads
    losses = run_threads(2, undisturbed, models)
    found = re.findall(r"\[rank (\d)\] step \d (\d+) (\S+) ", done.stdout)
    assert {(int(rank), int(step)) for rank, step, _ in found} == {(r, s) for r in (0, 1) for s in range(1, STEPS + 1)}
    wrong = [(r, step, loss, losses[int(r)][int(step)]) for r, step, loss in found if loss != losses[int(r)][int(step)]]
    assert wrong == [], wrong
    assert "continuing from the replica of step 3 in memory: no step is lost" in done.stderr
    assert done.stderr.count("the keeper of replicas on host") == 2
    assert two_hosts.left() == []
