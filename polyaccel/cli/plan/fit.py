"""`polyaccel plan CONFIG MODEL -n N --fit 16G`: the settings that fit a device's memory, the fastest first."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from polyaccel.cli.plan.activations import foretold
from polyaccel.cli.plan.tables import column_table, print_parts, short_bytes, short_count, titled
from polyaccel.comm.benchmark.table import CollectiveTimings
from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import data_ranks
from polyaccel.planner.assumptions import PlannedConfig
from polyaccel.planner.autotune.candidates import Candidate, candidates, own_candidate
from polyaccel.planner.autotune.cost_model import CostEstimate, CostModel, Pass
from polyaccel.planner.autotune.hardware_probe import USUAL, HardwareRates, rates_here
from polyaccel.planner.autotune.records import read_trials
from polyaccel.planner.autotune.tuner import in_order
from polyaccel.planner.model import ModelShape

_SHOWN, _SHOWN_TOO_LARGE = 12, 3
_OPERATIONS = 6
"""Of a parameter and a token: a product and a sum in the forward pass, twice as many in the backward pass."""
_SHARE_OF_PEAK = 0.4
"""Of the device's speed in a large product, what models reach as a rule."""


def run_fit(args: argparse.Namespace, planned: PlannedConfig, model: ModelShape) -> int:
    """Print which settings fit. The exit code is 1 when none does. Raises PolyaccelError."""
    config = planned.config
    speeds = None if args.comm is None else CollectiveTimings.read(args.comm)
    notes: list[str] = []
    records, told = ([], None) if args.trials is None else read_trials(args.trials)
    is_remote = True if told is None else told.is_remote
    known = _known_pass(args, config, model, notes, has_trials=bool(records))
    cost_model = CostModel(
        config,
        model if told is None else ModelShape("the model of the trials", told.specs, told.units),
        args.world_size,
        is_remote=is_remote,
        base_nbytes=0 if told is None else max(0, told.nbytes_before - told.nbytes),
        speeds=speeds,
        rates=_rates(is_remote=is_remote),
        known=known,
    )
    cost_model.learn(records)
    if speeds is None:
        notes.append("collectives at 1 GB/s a rank, for they were not measured (--comm)")
    every = candidates(config, args.world_size, is_remote=is_remote)
    if known.kept_nbytes is None and not records:
        own = own_candidate(config)
        every = tuple(each for each in every if _needs_alike(each, own))
        notes.append("activations are not counted, so only this config's micro-batch is shown (--sequence-length)")
    found = in_order([cost_model.predict(each) for each in every], args.fit, args.limit_host)
    fitting = [each for each in found if not each.excess(args.fit, args.limit_host)]
    too_large = [each for each in found if each.excess(args.fit, args.limit_host)]
    too_large.sort(key=lambda each: (each.step_s or 0.0, each.device_nbytes))
    if args.json:
        print(json.dumps(_as_json(fitting, too_large, args, (*planned.assumptions, *notes)), indent=2))
    else:
        _print(fitting, too_large, args, model, (*planned.assumptions, *notes))
    return 0 if fitting else 1


def _rates(*, is_remote: bool) -> HardwareRates:
    """The rates of this machine, with a usual link where a device has one and this machine does not have that
    device."""
    found = rates_here(Path.cwd())
    return replace(found, link_s=USUAL.link_s) if is_remote and not found.link_s else found


def _needs_alike(candidate: Candidate, own: Candidate) -> bool:
    """Whether a candidate's activations are those of the config's own settings."""
    return (candidate.micro_batch, candidate.recomputes) == (own.micro_batch, own.recomputes)


def _known_pass(
    args: argparse.Namespace, config: ResolvedConfig, model: ModelShape, notes: list[str], *, has_trials: bool
) -> Pass:
    """The known costs of a micro-batch's pass: activations where rows have a length, and the seconds of a sample. What
    was assumed for it is added to `notes`."""
    kept = recomputed = None
    fixed = 0.0
    if args.sequence_length is not None:
        one, two = (_peaks(args, config, rows) for rows in (1, 2))
        kept, recomputed = (float(two[way] - one[way]) for way in ("kept", "blocks recomputed"))
        fixed = max(0.0, one["kept"] - kept)
    samples = config.train_batch_size / data_ranks(config, args.world_size)
    if args.compute is not None:
        return Pass(args.compute / samples, kept, recomputed, fixed)
    if has_trials:
        return Pass(None, kept, recomputed, fixed)
    if args.sequence_length is None:
        notes.append("step s leaves out forward and backward passes; --sequence-length would add their time")
        return Pass(0.0, kept, recomputed, fixed)
    from polyaccel.accelerators.detect import choose_accelerator
    from polyaccel.torch.profiling.forward_work import product_speed

    accelerator = choose_accelerator(None)
    speed = product_speed(accelerator)
    notes.append(
        f"passes at {_SHARE_OF_PEAK:.0%} of the {speed / 1e12:.3g} TFLOPS of a large product on this machine's "
        f"{accelerator.name} (--compute, or the trials of a tuner)"
    )
    operations = _OPERATIONS * model.numel * args.sequence_length
    return Pass(operations / (_SHARE_OF_PEAK * speed), kept, recomputed, fixed)


def _peaks(args: argparse.Namespace, config: ResolvedConfig, rows: int) -> dict[str, int]:
    """The most bytes of activations of a micro-batch of so many rows, by what is recomputed."""
    named = argparse.Namespace(**{**vars(args), "batch": rows})
    return {each.way: each.peak_nbytes for each in foretold(named, config)}


def _print(
    fitting: list[CostEstimate],
    too_large: list[CostEstimate],
    args: argparse.Namespace,
    model: ModelShape,
    assumed: tuple[str, ...],
) -> None:
    head = f"{model.summary}: {short_count(model.numel)} parameters; {args.world_size} ranks; {short_bytes(args.fit)}"
    counts = f"{len(fitting)} of {len(fitting) + len(too_large)} settings fit"
    parts: list[Any] = [Text(f"{head} of a rank's device. {counts}.")]
    if assumed:
        parts.append(Text("\n".join(f"Assumed: {sentence}." for sentence in assumed)))
    if fitting:
        table = column_table("setting", "step s", "device", "of it states", "host")
        for each in fitting[:_SHOWN]:
            table.add_row(str(each.candidate), *_figures(each))
        parts.append(titled("Fits, the fastest first", table))
    for each in too_large[:_SHOWN_TOO_LARGE]:
        parts.append(Text(f"{each.candidate} does not fit: {why_too_large(each, args.fit, args.limit_host)}."))
    print_parts(parts)


def why_too_large(each: CostEstimate, device_nbytes: int, host_nbytes: int | None) -> str:
    """What a setting needs, of what, and how much more than there is."""
    if each.device_nbytes > device_nbytes:
        rest = each.device_nbytes - each.states_nbytes
        parts = f"states {short_bytes(each.states_nbytes)}"
        parts += f", activations and the process {short_bytes(rest)}" if rest else ""
        return f"{short_bytes(each.device_nbytes)} ({parts}) is {each.excess(device_nbytes)}"
    return f"{short_bytes(each.host_nbytes)} is {each.excess(None, host_nbytes)}"


def _figures(each: CostEstimate) -> tuple[str, ...]:
    seconds = "-" if each.step_s is None else f"{each.step_s:.3g}"
    return seconds, *(short_bytes(nbytes) for nbytes in (each.device_nbytes, each.states_nbytes, each.host_nbytes))


def _as_json(
    fitting: list[CostEstimate], too_large: list[CostEstimate], args: argparse.Namespace, assumed: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "limits": {"device_nbytes": args.fit, "host_nbytes": args.limit_host},
        "assumptions": list(assumed),
        "fitting": [asdict(each) for each in fitting],
        "too_large": [{**asdict(each), "why": why_too_large(each, args.fit, args.limit_host)} for each in too_large],
    }
