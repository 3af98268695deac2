"""`polyaccel plan CONFIG MODEL --ranks N --memory 16GiB --fit`: settings that fit a device, the fastest first."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.text import Text

from polyaccel.cli.plan.stages import estimated_activations
from polyaccel.cli.plan.tables import UNITS, column_table, print_parts, short_bytes, short_count, titled
from polyaccel.comm.benchmark import CollectiveTimings
from polyaccel.planner.assumptions import PlannedConfig
from polyaccel.planner.autotune.cost_model import CostEstimate
from polyaccel.planner.autotune.fit import FitRequest, FitResult, fit_settings
from polyaccel.planner.model import ModelShape
from polyaccel.utils.sizes import size

_SHOWN, _SHOWN_TOO_LARGE = 12, 3


def run_fit(args: argparse.Namespace, planned: PlannedConfig, model: ModelShape) -> int:
    """Print which settings fit. The exit code is 1 when none does. Raises PolyaccelError."""
    found = fit_settings(
        FitRequest(
            planned=planned,
            model=model,
            world_size=args.world_size,
            device_nbytes=args.memory,
            host_nbytes=args.host_memory,
            trials=args.trials,
            speeds=None if args.comm is None else CollectiveTimings.read(args.comm),
            compute_s=args.compute,
            sequence_length=args.sequence_length,
            peaks=lambda rows: {
                activation.way: activation.peak_nbytes
                for activation in estimated_activations(args, planned.config, rows)
            },
            product_speed=_product_speed,
        )
    )
    if args.json:
        print(json.dumps(_as_json(found, args), indent=2))
    else:
        _print(found, args, model)
    return 0 if found.fitting else 1


def _product_speed() -> tuple[str, float]:
    from polyaccel.torch.estimate.rank_share import accelerator_speed

    return accelerator_speed()


def _print(found: FitResult, args: argparse.Namespace, model: ModelShape) -> None:
    fitting, too_large, assumed = found.fitting, found.too_large, found.assumptions
    head = f"{model.summary}: {short_count(model.numel)} parameters; {args.world_size} ranks."
    count, limit = len(fitting) + len(too_large), size(args.memory)
    parts: list[Any] = [Text(f"No setting of {count} fits {limit} of a rank's device.")]
    if fitting:
        best = fitting[0]
        most = "Fastest" if found.counts_passes else "Least communication and update time"
        verdict = f"{most} of {len(fitting)} settings that fit {limit}: {best.candidate}, {size(best.device_nbytes)}"
        parts = [Text(f"{verdict} of a rank's device. {len(too_large)} more would not fit.", style="bold")]
    parts.append(Text(head))
    if assumed:
        parts.append(Text("\n".join(f"Assumed: {sentence}." for sentence in assumed)))
    if fitting:
        time = "step s" if found.counts_passes else "comm +\nupdate s"
        table = column_table("setting", time, "device", "of it\nstates", "host")
        for each in fitting[: len(fitting) if args.all or args.verbose else _SHOWN]:
            table.add_row(str(each.candidate), *_figures(each))
        parts.append(titled(f"Fits, the fastest first ({UNITS})", table))
    for each in too_large[:_SHOWN_TOO_LARGE]:
        parts.append(Text(f"{each.candidate} does not fit: {why_too_large(each, args.memory, args.host_memory)}."))
    print_parts(parts)


def why_too_large(each: CostEstimate, device_nbytes: int, host_nbytes: int | None) -> str:
    """What a setting needs, of what, and how much more than there is."""
    if each.device_nbytes > device_nbytes:
        rest = each.device_nbytes - each.states_nbytes
        parts = f"states {size(each.states_nbytes)}"
        parts += f", activations and the process {size(rest)}" if rest else ""
        return f"{size(each.device_nbytes)} ({parts}) is {each.excess(device_nbytes)}"
    return f"{size(each.host_nbytes)} is {each.excess(None, host_nbytes)}"


def _figures(each: CostEstimate) -> tuple[str, ...]:
    seconds = "-" if each.step_s is None else f"{each.step_s:.3g}"
    return seconds, *(short_bytes(nbytes) for nbytes in (each.device_nbytes, each.states_nbytes, each.host_nbytes))


def _as_json(found: FitResult, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "limits": {"device_nbytes": args.memory, "host_nbytes": args.host_memory},
        "assumptions": list(found.assumptions),
        "fitting": [asdict(each) for each in found.fitting],
        "too_large": [
            {**asdict(each), "why": why_too_large(each, args.memory, args.host_memory)} for each in found.too_large
        ],
    }
