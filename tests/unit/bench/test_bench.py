"""Pure parts of bench/: options, order of launches, and what figures become."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from bench.__main__ import CASES
from bench.cases import saves, steps, trainer, tuning, watching
from bench.machine import cpu_model
from bench.measure import interleave, parse_kib, rotated
from bench.runner import Option, Runs, Start, deepspeed_start, listed, one_of, positive
from polyaccel.config import load_resolved
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.cost_model import CostEstimate
from polyaccel.planner.autotune.records import TrialRecord
from polyaccel.planner.autotune.tuner import TuneResult

SETTINGS = {"dtype": "fp32", "micro_batch": 4, "ranks": 2}
MIB = 1 << 20


def make_runs(
    variant: str,
    *rounds: tuple[float, ...],
    losses: tuple[float, ...] = (5.0, 4.0, 3.0),
    dtype: str = "fp32",
    **figures: Any,
) -> Runs:
    """Return runs of two ranks, of which each round has these seconds of steps."""
    runs = Runs(variant, {**SETTINGS, "dtype": dtype})
    for number, seconds in enumerate(rounds or ((1.0,),)):
        rank = {"seconds": list(seconds), "losses": list(losses), "cpu": [0.5] * len(seconds), **figures}
        runs.rounds[number] = [rank, rank]
    return runs


def test_tax_is_over_local_of_the_same_round() -> None:
    # The machine is twice as slow in the second round; pooled medians would see that as a tax.
    local = make_runs("local", (1.0,), (2.0,))
    ours = make_runs("pa2", (1.1,), (2.4,), (9.0,))  # the last of a round without local
    found = {"local": local, "pa2": ours}
    assert steps.tax(local, found) is None
    assert steps.tax(ours, found) == pytest.approx((0.1 + 0.2) / 2)
    assert steps.tax(ours, {"pa2": ours}) is None
    assert steps.columns(SETTINGS)["tokens/s"](ours, found) == f"{4 * 128 * 2 / 2.4:.0f}"


@pytest.mark.parametrize(
    ("variant", "dtype", "losses", "is_wrong"),
    [
        ("pa0", "fp32", (5.0, 4.0, 3.0), False),
        ("pa0", "fp32", (5.0, 4.0, 3.0 + 0.9 * steps.LOSS_TOLERANCE), False),
        ("pa0", "fp32", (5.0, 4.0 - 1.1 * steps.LOSS_TOLERANCE, 3.0), True),
        ("pa0", "fp32", (5.0, 4.0, float("nan")), True),
        ("pa0", "bf16", (5.0, 4.1, 3.0), False),  # policies differ
        ("pa0", "bf16", (5.0, float("inf"), 3.0), True),
        ("pa3q", "fp32", (5.0, 4.1, 3.0), False),
        ("local", "fp32", (5.0, 1.0, 1.0), False),  # only the first loss comes before any update
        ("local", "fp32", (9.0, 4.0, 3.0), True),
    ],
)
def test_losses_unlike_ddp_are_wrong(variant: str, dtype: str, losses: tuple[float, ...], is_wrong: bool) -> None:
    found = {"ddp": make_runs("ddp", dtype=dtype), variant: make_runs(variant, losses=losses, dtype=dtype)}
    assert steps.is_wrong(found[variant], found) is is_wrong
    assert steps.deviation(found["ddp"], found) is None


def test_without_ddp_the_first_that_communicates_is_the_reference() -> None:
    found = {"local": make_runs("local", losses=(9.0, 4.0)), "pa1": make_runs("pa1", losses=(5.0, 4.0))}
    assert steps.is_wrong(found["local"], found)
    assert steps.deviation(found["pa1"], found) is None


def test_a_round_of_the_reference_that_differs_from_the_other_is_wrong() -> None:
    runs = make_runs("ddp", (1.0,), (1.0,))
    runs.rounds[1] = make_runs("ddp", losses=(5.0, 4.0, 3.1)).rounds[0]
    assert steps.is_wrong(runs, {"ddp": runs})


@pytest.mark.parametrize(("dtype", "nbytes"), [("fp32", 16), ("bf16", 18)])
def test_memory_is_compared_with_the_formula(dtype: str, nbytes: int) -> None:
    """The weights that autocast makes are states of plain torch, and nothing that engines need."""
    base = {"base": 10 * MIB, "pss": 0, "params": MIB}
    local = make_runs("local", **base, peak=100 * MIB, estimate=None, dtype=dtype)
    ours = make_runs("pa2", **base, peak=80 * MIB, estimate={"parameters": 4 * MIB, "gradients": 3 * MIB}, dtype=dtype)
    ddp = make_runs("ddp", **base, peak=120 * MIB, estimate=None, dtype=dtype)
    columns = steps.memory_columns({"dtype": dtype})
    found = {"local": local, "ddp": ddp, "pa2": ours}
    rest = 100 - 10 - nbytes
    names = ("states by formula", "rest", "expected", "measured")
    assert [columns[name](local, found) for name in names] == [str(nbytes), str(rest), "100", "100"]
    assert [columns[name](ddp, found) for name in names] == ["-", "-", "-", "120"]
    assert [columns[name](ours, found) for name in names] == ["7", str(rest), str(10 + 7 + rest), "80"]


def test_calls_interleave_and_take_turns_at_being_first() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name) or len(order)) for name in ("local", "ddp", "pa2")}
    found = interleave(calls, 2)
    assert [order[at : at + 3] for at in (0, 3, 6)] == [rotated(list(calls), turn) for turn in (-1, 0, 1)]
    assert found == {"local": [4, 9], "ddp": [5, 7], "pa2": [6, 8]}


def test_options_take_their_type_from_the_default() -> None:
    parser = argparse.ArgumentParser()
    options = {
        "steps": Option(3),
        "stage": Option(2, "", range(4)),
        "kib": Option((1, 2)),
        "impl": Option(("a",), "", "ab"),
    }
    for name, option in {**options, "apart": Option(False), "rate": Option(2.5)}.items():
        option.add_to(parser, name)
    assert vars(parser.parse_args([])) == {
        "steps": 3, "stage": 2, "kib": (1, 2), "impl": ("a",), "apart": False, "rate": 2.5
    }  # fmt: skip
    changed = vars(parser.parse_args(["--stage", "0", "--kib", "4,1", "--impl", "b, a,b", "--apart"]))
    assert changed == {"steps": 3, "stage": 0, "kib": (4, 1), "impl": ("b", "a"), "apart": True, "rate": 2.5}
    for kind, text in ((one_of("ab"), "c"), (positive, "0"), (positive, "-1"), (positive, "")):
        with pytest.raises(argparse.ArgumentTypeError):
            listed(kind)(text)


def test_what_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (steps, saves):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    args = argparse.Namespace(deepspeed=None)
    absent = {
        name for name, start in {**steps.variants(args), **saves.variants(args)}.items() if isinstance(start, str)
    }
    assert absent == {"ds0", "ds1", "ds2", "ds3", "deepspeed", "orbax", "orbax-async"}
    assert isinstance(deepspeed_start(args), str)


def test_launchers_start_the_same_module() -> None:
    for launcher in ("polyaccel", "torchrun", "mpirun", "python"):
        assert "bench.rank" in Start(launcher=launcher).command()
    assert Start(options=("--hosts", "a:1")).command()[4:6] == ["--hosts", "a:1"]
    assert {"comm", "steps", "replica", "all-to-all"} <= set(CASES)


def test_speed_of_the_trainer_is_of_the_medians_over_all_rounds() -> None:
    ours = make_runs("ours", (1.0, 9.0), (1.0, 2.0), losses=(2.0, 1.0))
    theirs = make_runs("DeepSpeed", (3.0, 3.0), (3.0, 4.0), losses=(2.0, 2.0))
    cells = {name: column(ours, {"DeepSpeed": theirs}) for name, column in trainer.columns({}).items()}
    assert cells == {"median ms": "1500.0", "best ms": "1000.0", "speed": "2.00", "losses apart": "5.0e-01"}


def test_turns_are_compared_with_those_of_the_same_round() -> None:
    """Two ranks, three rounds; the machine was slow in the second, for both variants."""
    first = {"nothing": [[0, 1.0], [0, 4.0], [0, 1.0]], "everything": [[0, 1.01], [0, 4.04], [0, 1.0]]}
    second = {"nothing": [[0, 3.0], [0, 8.0], [0, 3.0]], "everything": [[0, 3.03], [0, 8.08], [0, 3.04]]}
    assert watching.of_turns([first, second], "nothing", 1) == [2.0, 6.0, 2.0]
    assert watching.more_than([first, second], "everything", "nothing", 1)[0] == "+1.00 %"


@pytest.mark.parametrize("variant", watching.VARIANTS)
def test_a_variant_is_a_config(variant: str) -> None:
    """Each has what its name says and nothing else; `everything` has all of them."""
    base, own = watching.config_of("nothing", 2, 4, "runs"), watching.config_of(variant, 2, 4, "runs")
    assert load_resolved(own, world_size=2).zero_optimization.stage == 2
    added = set(own) - set(base)
    assert bool(added) == (variant != "nothing")
    if variant == "everything":
        rest = [set(watching.config_of(one, 2, 4, "runs")) - set(base) for one in watching.VARIANTS if one != variant]
        assert added == set().union(*rest, {"trace", "flops_profiler"})


def test_the_shortest_of_all_rounds_counts_and_what_failed_is_left_out() -> None:
    every = [
        CostEstimate(Candidate(stage=0, micro_batch=n, accumulation=1, bucket_numel=1), 100 + n, 0, 50, float(n))
        for n in range(1, 5)
    ]
    first = [TrialRecord(candidate=one.candidate, step_s=1.1 * (one.step_s or 0), peak_nbytes=100) for one in every]
    second = [TrialRecord(candidate=one.candidate, step_s=one.step_s, peak_nbytes=120) for one in every]
    second[1] = replace(second[1], step_s=None, failure="it hung")
    first[2] = second[2] = replace(first[2], step_s=None, failure="it hung")
    best = TrialRecord(candidate=every[1].candidate, step_s=1.0, peak_nbytes=1)
    answer = TuneResult(best=best, records=(best,), estimates=tuple(every), limit_nbytes=None, why="")
    pairs = tuning.paired(answer, [first, second])
    assert [(one.step_s, one.peak_nbytes) for _, one in pairs] == [(1.0, 120), (pytest.approx(2.2), 100), (4.0, 120)]
    assert tuning.verdict(pairs, answer, 1 << 30)[1] == pytest.approx(1.2)


def test_kib_lines() -> None:
    text = "Name:\tpython\nVmHWM:\t     12 kB\nPss:  3 kB\nThreads:\t4\n"
    assert parse_kib(text) == {"VmHWM": 12 * 1024, "Pss": 3 * 1024}


def test_cpu_model() -> None:
    text = (
        "processor : 0\nmodel name : AMD EPYC\nflags : fpu avx2 avx512_bf16\n\nprocessor : 1\nmodel name : AMD EPYC\n"
    )
    assert cpu_model(text + "flags : fpu avx2\n") == "AMD EPYC (avx2)"
    assert cpu_model("processor : 0\n")  # some virtual machines hide it
