"""The pure parts of bench/: what is run in which order, and what the figures become."""

from __future__ import annotations

import argparse
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from bench.machine import cpu_model
from bench.measure import parse_kib
from bench.steps.cases import VARIANTS, Case, Job, RankMemory, Run
from bench.steps.sitting import Sitting, listed, one_of, positive, read_arguments
from bench.steps.summary import LOSS_TOLERANCE, compare_memory, summarise

CASE = Case("tiny", 4, "fp32")


def make_run(
    variant: str,
    *,
    step_s: tuple[float, ...] = (1.0, 2.0, 3.0),
    losses: tuple[float, ...] = (5.0, 4.0, 3.0),
    case: Case = CASE,
    round_: int = 0,
    peak: int = 100,
    estimate: dict[str, int] | None = None,
) -> Run:
    ranks = tuple(RankMemory(10, 20, peak + rank, 50, 40 + rank) for rank in range(2))
    return Run(
        job=Job(variant, case, warmup=1, steps=len(step_s), round=round_),
        param_numel=1,
        step_s=step_s,
        losses=losses,
        phase_s={},
        cpu_s=0.5,
        minor_faults=7.0,
        initialise_s=0.1,
        other_cpus=0.0,
        memory=ranks,
        estimate_nbytes=estimate,
    )


def test_tax_is_over_local_of_the_same_round() -> None:
    # The machine is twice as slow in the second round; pooled medians would see that as a tax.
    runs = [
        make_run("local", step_s=(1.0,)),
        make_run("pa2", step_s=(1.1,)),
        make_run("local", step_s=(2.0,), round_=1),
        make_run("pa2", step_s=(2.4,), round_=1),
        make_run("pa2", step_s=(9.0,), round_=2),  # of a round without local
    ]
    rows = {row.variant: row for row in summarise(runs)}
    assert rows["local"].tax is None
    assert rows["pa2"].tax == pytest.approx((0.1 + 0.2) / 2)
    assert rows["pa2"].step_s == 2.4
    assert rows["pa2"].fastest_s == 1.1


def test_row_has_totals_over_ranks_and_the_worst_memory() -> None:
    (row,) = summarise([make_run("ddp", peak=100), make_run("ddp", peak=300, round_=1)])
    assert row.tokens_per_s == 4 * 128 * 2 / 2.0
    assert (row.peak_nbytes, row.pss_nbytes) == (301, 41)
    assert row.tax is None  # nothing to compare with


@pytest.mark.parametrize(
    ("losses", "is_wrong"),
    [
        ((5.0, 4.0, 3.0), False),
        ((5.0, 4.0, 3.0 + 0.9 * LOSS_TOLERANCE), False),
        ((5.0, 4.0 - 1.1 * LOSS_TOLERANCE, 3.0), True),
        ((5.0, 4.0, float("nan")), True),
        ((5.0, float("inf"), 3.0), True),
    ],
)
def test_losses_unlike_ddp_are_wrong(losses: tuple[float, ...], is_wrong: bool) -> None:
    rows = {row.variant: row for row in summarise([make_run("ddp"), make_run("pa0", losses=losses)])}
    assert rows["pa0"].is_wrong is is_wrong
    assert rows["ddp"].deviation is None
    assert not rows["ddp"].is_wrong


def test_a_reference_that_is_not_a_number_makes_everything_wrong() -> None:
    rows = summarise([make_run("ddp", losses=(float("nan"),)), make_run("pa0", losses=(5.0,))])
    assert [row.is_wrong for row in rows] == [True, True]


def test_without_ddp_the_first_that_communicates_is_the_reference() -> None:
    rows = {row.variant: row for row in summarise([make_run("local", losses=(9.0, 4.0)), make_run("pa1")])}
    assert rows["local"].is_wrong  # its first loss, before any update, must be the same
    assert rows["pa1"].deviation is None


def test_local_is_compared_in_the_first_loss_only() -> None:
    rows = {row.variant: row for row in summarise([make_run("local", losses=(5.0, 1.0, 1.0)), make_run("ddp")])}
    assert rows["local"].deviation == 0.0


def test_bf16_losses_are_shown_but_may_differ() -> None:
    case = replace(CASE, dtype="bf16")
    runs = [make_run("ddp", case=case), make_run("pa0", case=case, losses=(5.0, 4.1, 3.0))]
    row = next(row for row in summarise(runs) if row.variant == "pa0")
    assert row.deviation == pytest.approx(0.1)
    assert not row.is_wrong


def test_bf16_losses_must_be_numbers() -> None:
    case = replace(CASE, dtype="bf16")
    (row,) = summarise([make_run("pa0", case=case, losses=(5.0, float("nan")))])
    assert row.is_wrong


def test_a_round_of_the_reference_that_differs_from_the_other_is_wrong() -> None:
    (row,) = summarise([make_run("ddp"), make_run("ddp", round_=1, losses=(5.0, 4.0, 3.1))])
    assert row.is_wrong


def test_memory_beside_the_formula() -> None:
    runs = [
        make_run("pa2", peak=80, estimate={"parameters": 4, "gradients": 3}),
        make_run("local", peak=100),
        make_run("ddp", peak=120),
    ]
    local, ddp, ours = compare_memory(runs)
    assert local.expected == local.peak == 100.5  # by definition
    assert local.rest == 100.5 - 10 - 16
    assert (ddp.states, ddp.expected, ddp.peak) == (None, None, 120.5)
    assert (ours.states, ours.expected, ours.peak) == (7, 10 + 7 + local.rest, 80.5)


def test_the_weights_that_autocast_makes_are_states_of_plain_torch_and_nothing_that_engines_need() -> None:
    bf16 = replace(CASE, dtype="bf16")
    local, ours = compare_memory([make_run("local", case=bf16), make_run("pa3", case=bf16, estimate={"all": 7})])
    assert local.expected == local.peak
    assert ours.expected == 10 + 7 + (100.5 - 10 - 18)


def test_variants_interleave_and_take_turns_at_being_first() -> None:
    cases = (CASE, replace(CASE, micro_batch=1))
    jobs = list(Sitting(cases, ("local", "ddp", "pa2"), warmup=1, steps=2, rounds=3).jobs())
    assert len(jobs) == len(set(jobs)) == 2 * 3 * 3
    orders = [[job.variant for job in jobs if job.round == turn and job.case == CASE] for turn in range(3)]
    assert orders == [["local", "ddp", "pa2"], ["ddp", "pa2", "local"], ["pa2", "local", "ddp"]]
    assert [job.round for job in jobs] == sorted(job.round for job in jobs)


def test_what_is_not_installed_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.steps.launch.find_spec", lambda name: None)
    args = argparse.Namespace(
        impl=("ds1", "ddp"), size="tiny", ranks=(2,), micro_batch=(1, 4), dtype=("fp32",), warmup=1, steps=2, rounds=3
    )
    console = Console(file=StringIO())
    sitting = read_arguments(args, console)
    assert sitting == Sitting((Case("tiny", 1, "fp32"), Case("tiny", 4, "fp32")), ("ddp",), 1, 2, 3)
    args.impl = ("ds1",)
    with pytest.raises(SystemExit) as caught:
        read_arguments(args, console)
    assert "--impl" in str(caught.value)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == 2 * "ds1 skipped: deepspeed is not installed\n"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_job_survives_the_command_line(variant: str) -> None:
    job = Job(variant, CASE, warmup=2, steps=3, round=4)
    assert Job.from_json(job.to_json()) == job


def test_lists_of_names_and_numbers() -> None:
    assert listed(one_of(VARIANTS))("pa2, ddp,pa2") == ("pa2", "ddp")
    assert listed(positive)("4,1") == (4, 1)
    for kind, text in ((one_of(VARIANTS), "pa9"), (positive, "0"), (positive, "-1"), (positive, "")):
        with pytest.raises(argparse.ArgumentTypeError):
            listed(kind)(text)


def test_kib_lines() -> None:
    text = "Name:\tpython\nVmHWM:\t     12 kB\nPss:  3 kB\nThreads:\t4\n"
    assert parse_kib(text) == {"VmHWM": 12 * 1024, "Pss": 3 * 1024}


def test_cpu_model() -> None:
    text = (
        "processor : 0\nmodel name : AMD EPYC\nflags : fpu avx2 avx512_bf16\n\nprocessor : 1\nmodel name : AMD EPYC\n"
    )
    assert cpu_model(text + "flags : fpu avx2\n") == "AMD EPYC (avx2)"
    assert cpu_model("processor : 0\n")  # some virtual machines hide it
