"""The settings that fit a device's memory, by the predicted seconds of a step, the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polyaccel.comm.benchmark import CollectiveTimings
from polyaccel.config.meshes import data_ranks
from polyaccel.planner.assumptions import PlannedConfig
from polyaccel.planner.autotune.candidates import Candidate, candidates, own_candidate
from polyaccel.planner.autotune.cost_model import CostEstimate, CostModel, Pass
from polyaccel.planner.autotune.hardware_probe import USUAL, HardwareRates, rates_here
from polyaccel.planner.autotune.records import read_trials
from polyaccel.planner.autotune.tuner import in_order
from polyaccel.planner.model import ModelShape

_OPERATIONS = 6
"""Of a parameter and a token: a product and a sum in the forward pass, twice as many in the backward pass."""
_SHARE_OF_PEAK = 0.4
"""Of the device's speed in a large product, what models reach as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """What to fit: `device_nbytes` of a rank's device (and `host_nbytes` of its host; None: no limit) on `world_size`
    ranks. `trials` is the folder of a tuner's trials, `speeds` are those of collectives, `compute_s` the seconds that a
    step computes, and `sequence_length` the tokens of a row.

    Where rows have a length, `peaks(rows)` gives the most bytes of a micro-batch's activations by what is recomputed
    (`kept`, `blocks recomputed`), and `product_speed()` the name of this machine's accelerator and its operations a
    second in a large product.
    """

    planned: PlannedConfig
    model: ModelShape
    world_size: int
    device_nbytes: int
    host_nbytes: int | None
    trials: Path | None
    speeds: CollectiveTimings | None
    compute_s: float | None
    sequence_length: int | None
    peaks: Callable[[int], Mapping[str, int]]
    product_speed: Callable[[], tuple[str, float]]


@dataclass(frozen=True, slots=True)
class FitResult:
    """The settings that fit, and those that do not, each the fastest first. `assumptions` are sentences. Seconds are
    those of collectives and updates alone unless `counts_passes`."""

    fitting: list[CostEstimate]
    too_large: list[CostEstimate]
    assumptions: tuple[str, ...]
    counts_passes: bool


def fit_settings(request: FitRequest) -> FitResult:
    """Predict every candidate and compare it with the limits."""
    config, speeds, notes = request.planned.config, request.speeds, list[str]()
    records, shape = ([], None) if request.trials is None else read_trials(request.trials)
    is_remote = True if shape is None else shape.is_remote
    known = _known_pass(request, notes, has_trials=bool(records))
    cost_model = CostModel(
        config,
        request.model if shape is None else ModelShape("the model of the trials", shape.specs, shape.units),
        request.world_size,
        is_remote=is_remote,
        base_nbytes=0 if shape is None else max(0, shape.nbytes_before - shape.nbytes),
        speeds=speeds,
        rates=_rates(is_remote=is_remote),
        known=known,
    )
    cost_model.learn(records)
    if speeds is None:
        notes.append("collectives are not measured, 1 GB/s a rank is assumed (--comm)")
    every = candidates(config, request.world_size, is_remote=is_remote)
    if known.kept_nbytes is None and not records:
        own = own_candidate(config)
        every = tuple(each for each in every if _needs_alike(each, own))
        notes.append("activations are not counted, so only this config's micro-batch is shown (--sequence-length)")
    limits = (request.device_nbytes, request.host_nbytes)
    found = in_order([cost_model.predict(each) for each in every], *limits)
    too_large = [each for each in found if each.excess(*limits)]
    too_large.sort(key=lambda each: (each.step_s or 0.0, each.device_nbytes))
    fitting = [each for each in found if not each.excess(*limits)]
    counts_passes = bool(records) or known.sample_s != 0.0
    return FitResult(fitting, too_large, (*request.planned.assumptions, *notes), counts_passes)


def _rates(*, is_remote: bool) -> HardwareRates:
    """The rates of this machine, with a usual link where a device has one and this machine has no such device."""
    found = rates_here(Path.cwd())
    return replace(found, link_s=USUAL.link_s) if is_remote and not found.link_s else found


def _needs_alike(candidate: Candidate, own: Candidate) -> bool:
    """Whether a candidate's activations are those of the config's own settings."""
    return (candidate.micro_batch, candidate.recomputes) == (own.micro_batch, own.recomputes)


def _known_pass(request: FitRequest, notes: list[str], *, has_trials: bool) -> Pass:
    """Return a micro-batch's known activations and seconds; assumptions are added to `notes`."""
    kept = recomputed = None
    fixed = 0.0
    if request.sequence_length is not None:
        one, two = request.peaks(1), request.peaks(2)
        kept, recomputed = (float(two[way] - one[way]) for way in ("kept", "blocks recomputed"))
        fixed = max(0.0, one["kept"] - kept)
    if request.compute_s is not None:
        config = request.planned.config
        samples = config.train_batch_size / data_ranks(config, request.world_size)
        return Pass(request.compute_s / samples, kept, recomputed, fixed)
    if has_trials:
        return Pass(None, kept, recomputed, fixed)
    if request.sequence_length is None:
        notes.append("forward and backward passes are not counted in the seconds (--sequence-length, --compute)")
        return Pass(0.0, kept, recomputed, fixed)
    name, speed = request.product_speed()
    notes.append(
        f"passes at {_SHARE_OF_PEAK:.0%} of the {speed / 1e12:.3g} TFLOPS of a large product on this machine's "
        f"{name} (--compute, or the trials of a tuner)"
    )
    operations = _OPERATIONS * request.model.numel * request.sequence_length
    return Pass(operations / (_SHARE_OF_PEAK * speed), kept, recomputed, fixed)
