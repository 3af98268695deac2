"""What a setting will need and how long its step will take: planned states, measured kernels and collectives, and the
results of trials.

[Note: Step time model]
With the samples of a step fixed, every setting computes the same, so its step is that of a trial, plus what differs: a
fixed cost for each micro-batch, a forward pass more where blocks are computed again, an update of a smaller share, the
planned collectives, and states that come from elsewhere. Each is a feature whose weight is known before the first trial
from its own measurements (or from the first trial's phases), and which further trials correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np

from polyaccel.comm.benchmark import CollectiveTimings
from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import mesh_of
from polyaccel.core.types import ParamSpec
from polyaccel.errors import CommError
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.hardware_probe import USUAL, HardwareRates
from polyaccel.planner.autotune.records import TrialRecord
from polyaccel.planner.forecast import layout_of, step_plan
from polyaccel.planner.model import ModelShape, comm_seconds
from polyaccel.planner.optimizer_needs import OptimizerNeeds
from polyaccel.zero.plan.memory import estimate_memory
from polyaccel.zero.plan.placement import Place
from polyaccel.zero.plan.traffic import step_traffic

Features = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Weight:
    """Gaussian prior of a regression weight: mean, standard deviation and lower bound."""

    value: float
    spread: float
    least: float = -inf


class RidgeRegression:
    """A figure as a sum of features. Without measurements the weights are those that are known; each measurement moves
    them as far as it says more than that.

    The most likely weights where errors are normal: of measurements by a share of their value that each one says, of
    each weight by its spread.
    """

    def __init__(self, known: Mapping[str, Weight]) -> None:
        self._known = dict(known)
        self.weights = {name: weight.value for name, weight in known.items()}

    def fit(self, measured: Sequence[tuple[Features, float, float]]) -> None:
        """Fit weights to `measured` (features, figure, relative error) and the prior."""
        names = [name for name, weight in self._known.items() if weight.spread > 0]
        rows, targets = [], []
        for features, figure, error in measured:
            scale = 1 / (error * max(abs(figure), 1e-12))
            rest = figure - sum(self._known[name].value * size for name, size in features.items() if name not in names)
            rows.append([scale * features.get(name, 0.0) * self._known[name].spread for name in names])
            targets.append(scale * (rest - sum(features.get(name, 0.0) * self._known[name].value for name in names)))
        if not rows:
            return
        matrix = np.vstack([np.array(rows), np.eye(len(names))])
        found, *_ = np.linalg.lstsq(matrix, np.concatenate([np.array(targets), np.zeros(len(names))]), rcond=None)
        for name, steps in zip(names, found, strict=True):
            known = self._known[name]
            self.weights[name] = max(known.least, known.value + float(steps) * known.spread)

    def __call__(self, features: Features) -> float:
        return sum(self.weights[name] * size for name, size in features.items())


_USUAL_NBYTES_PER_S = 1e9
_KEPT_SHARE = 0.5
"""Of activations, where blocks are computed again: their inputs, the one block that is computed, and the head."""
_RECOMPUTING_NBYTES = 72 << 20
"""What a process on a host loads when it first computes blocks again: torch's modules for dispatch in Python."""
_PASSING_NBYTES = 80 << 20
"""What a process on a host takes with its first passes, whatever their rows: libraries, threads, buffers of ranks."""
_TRIAL_ERROR = 0.03


@dataclass(frozen=True, slots=True)
class Pass:
    """What is known of a micro-batch's pass before any trial. `sample_s`: seconds of a sample's forward and backward
    pass; the bytes of activations of a sample, kept and where blocks are computed again, and those in addition to
    samples. None where unknown."""

    sample_s: float | None = None
    kept_nbytes: float | None = None
    recomputed_nbytes: float | None = None
    fixed_nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What a candidate will need of the device and the host on each rank, `states_nbytes` of the device's for planned
    states and the rest for activations and the process; and the seconds of its step, None where the time of a pass is
    unknown."""

    candidate: Candidate
    device_nbytes: int
    host_nbytes: int
    states_nbytes: int
    step_s: float | None

    def excess(self, device_nbytes: int | None, host_nbytes: int | None = None) -> str:
        """Why it does not fit limits, in words; "" where it does. None is not a limit."""
        for place, needs, limit in (
            ("device", self.device_nbytes, device_nbytes),
            ("host", self.host_nbytes, host_nbytes),
        ):
            if limit is not None and needs > limit:
                return f"{needs / limit - 1:.0%} more than the memory of the {place}" if limit else f"no {place} memory"
        return ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of a candidate's own plan: bytes of states by place, elements that a rank updates, the operations of products in
    that, bytes on the way from and to where they rest, and the seconds of its collectives."""

    device_nbytes: int
    host_nbytes: int
    updated_numel: int
    operations: int
    linked_nbytes: int
    filed_nbytes: int
    comm_s: float


class CostModel:
    """Estimates candidates of `config` on `world_size` ranks that train `model`.

    `base_nbytes` is what a rank's process has in use before there is a model, where that counts. `is_remote`: the
    device's memory is not the host's; where it is, both count as the device's. Without `speeds` of collectives 1 GB/s
    is assumed.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: ModelShape,
        world_size: int,
        *,
        is_remote: bool,
        base_nbytes: int = 0,
        speeds: CollectiveTimings | None = None,
        rates: HardwareRates = USUAL,
        known: Pass = Pass(),
    ) -> None:
        self._config, self._model, self._world_size = config, model, world_size
        self._is_remote, self._base_nbytes, self._speeds = is_remote, base_nbytes, speeds
        self._rates, self._pass = rates, known
        self._plans = cache(self._plan)
        self._time: RidgeRegression | None = None
        self._memory: RidgeRegression | None = None
        self.learn([])

    def learn(self, records: Sequence[TrialRecord]) -> None:
        """Let trials correct the estimates. The first good one stands for all that was not measured."""
        good = [record for record in records if record.is_good]
        self._time, self._memory = self._known_time(good), self._known_memory(good)
        if self._time is not None:
            self._time.fit(
                [(self._time_features(one.candidate), one.step_s or 0.0, max(_TRIAL_ERROR, one.spread)) for one in good]
            )
        self._memory.fit([(self._memory_features(one.candidate), self._rest(one), _TRIAL_ERROR) for one in good])

    def predict(self, candidate: Candidate) -> CostEstimate:
        """The needs of a candidate and the seconds of its step, by all that is known now."""
        plan = self._plans(candidate)
        assert self._memory is not None  # set by learn
        rest = max(0.0, self._memory(self._memory_features(candidate)))
        states, host = plan.device_nbytes, plan.host_nbytes
        if not self._is_remote:
            states, host = states + host, 0
        device = states + self._base_nbytes + round(rest)
        seconds = None if self._time is None else max(0.0, self._time(self._time_features(candidate)))
        return CostEstimate(candidate, device, host, states, seconds)

    def _plan(self, candidate: Candidate) -> _Plan:
        config = candidate.applied_to(self._config)
        mesh, specs = mesh_of(config, self._world_size), self._model.specs
        if candidate.tensor > 1:
            specs = tuple(_shared(spec, candidate.tensor) for spec in specs)
        layout = layout_of(config, specs, self._model.units, mesh)
        plan = step_plan(config, layout, is_remote=self._is_remote)
        memory = estimate_memory(plan)
        updated = sum(spec.numel for spec in specs if spec.trainable)
        costs = OptimizerNeeds.of(config, specs).costs
        operations = sum(spec.numel * costs.get(spec.fqn, 0) for spec in specs)
        ranks = 1 if candidate.stage == 0 else max(1, self._world_size // candidate.tensor)
        updated, operations = -(-updated // ranks), -(-operations // ranks)
        states_nbytes = 4 * updated * 3  # float32 weights and Adam's two states, as good as any guess
        linked = 2 * 4 * updated if candidate.offload != "none" and self._is_remote else 0
        if candidate.offload_param != "none" and self._is_remote:
            linked += candidate.accumulation * 4 * updated
        filed = 2 * states_nbytes if candidate.offload == "nvme" else 0
        filed += candidate.accumulation * 2 * 4 * updated if candidate.offload_param == "nvme" else 0
        try:
            comm_s = None if self._speeds is None else comm_seconds(plan, self._speeds)
        except CommError:  # a table without an operation of the plan
            comm_s = None
        if comm_s is None:
            comm_s = step_traffic(plan).total_nbytes / _USUAL_NBYTES_PER_S
        device, host = memory.peak_nbytes(Place.DEVICE), memory.peak_nbytes(Place.HOST)
        return _Plan(device, host, updated, operations, linked, filed, comm_s)

    def _rest(self, record: TrialRecord) -> float:
        """What a trial had in use in addition to the planned states and the process itself."""
        plan = self._plans(record.candidate)
        planned = plan.device_nbytes + (0 if self._is_remote else plan.host_nbytes)
        return max(1.0, (record.peak_nbytes or 0) - planned - self._base_nbytes)

    def _time_features(self, candidate: Candidate) -> Features:
        plan, rates = self._plans(candidate), self._rates
        samples = candidate.micro_batch * candidate.accumulation / candidate.sharing
        is_host = candidate.offload != "none" and self._is_remote
        elsewhere = rates.update_host_s if is_host else rates.update_device_s
        return {
            "samples": samples,
            "micro-batches": candidate.accumulation,
            "recomputed": samples * candidate.recomputes,
            "recomputed micro-batches": candidate.accumulation * candidate.recomputes,
            "updates": plan.updated_numel * elsewhere + plan.operations * rates.operation_s,
            "collectives": plan.comm_s,
            "gathering": samples * (candidate.stage == 3),
            "link": plan.linked_nbytes * rates.link_s,
            "files": plan.filed_nbytes * rates.file_s,
            "shared": samples * (candidate.sharing > 1),
        }

    def _known_time(self, good: Sequence[TrialRecord]) -> RidgeRegression | None:
        """The weights before `good` trials correct them; None where the time of a pass is unknown."""
        sample_s = self._pass.sample_s
        forward_s, spread = (sample_s or 0.0) / 3, 1.0
        if good:
            first = good[0]
            samples = first.candidate.micro_batch * first.candidate.accumulation / first.candidate.sharing
            phases = first.phase_s
            passes_s = sum(phases.get(name, 0.0) for name in ("forward", "backward")) or (first.step_s or 0.0)
            forward_s, spread = (phases.get("forward", 0.0) or passes_s / 3) / samples, 0.3
            sample_s = max(passes_s / samples - forward_s * first.candidate.recomputes, forward_s)
        if sample_s is None:
            return None
        known = {
            "samples": (sample_s, spread * sample_s),
            "micro-batches": (0.03 * sample_s, 0.15 * sample_s),
            "recomputed": (forward_s, 0.3 * forward_s),
            "recomputed micro-batches": (0.0, 0.1 * sample_s),
            "updates": (1.0, 0.5),
            "collectives": (1.0, 1.0 if self._speeds is None else 0.5),
            "gathering": (0.0, 0.05 * sample_s),
            "link": (1.0, 0.5),
            "files": (1.0, 0.7),
            "shared": (0.1 * sample_s, 0.2 * sample_s),
        }
        return RidgeRegression({name: Weight(*pair, least=0.0) for name, pair in known.items()})

    def _memory_features(self, candidate: Candidate) -> Features:
        rows = candidate.micro_batch / candidate.sharing
        return {
            "always": 1.0,
            "rows": rows * (self._kept_share() if candidate.recomputes else 1.0),
            "recomputed": 1.0 * candidate.recomputes,
            "recomputed rows": rows * candidate.recomputes,
            "sharded": 1.0 * (candidate.stage > 0),
            "scattered": 1.0 * (candidate.stage > 1),
            "gathering": 1.0 * (candidate.stage == 3),
        }

    def _kept_share(self) -> float:
        """Of a row's activations, what is there where blocks are computed again."""
        kept, recomputed = self._pass.kept_nbytes, self._pass.recomputed_nbytes
        return recomputed / kept if kept and recomputed is not None else _KEPT_SHARE

    def _known_memory(self, good: Sequence[TrialRecord]) -> RidgeRegression:
        """The weights before `good` trials correct them. One trial cannot separate what grows with its rows from what
        does not. On a host, pages of parameters that ranks share count a second time where they were written, and how
        full the buffers of scattered gradients are at the peak is left to trials."""
        known = self._pass
        rows, always, states = known.kept_nbytes, known.fixed_nbytes, 0.05 * self._model_nbytes()
        loaded = 0.0 if self._is_remote else float(_RECOMPUTING_NBYTES)
        mapped = 0.0 if self._is_remote or self._world_size == 1 else float(self._model_nbytes())
        spread = 0.2
        if rows is None:
            rows = 0.0
            if good:
                first = self._memory_features(good[0].candidate)
                rest = self._rest(good[0]) - loaded * first["recomputed"] - mapped * first["sharded"]
                rest = max(0.2 * self._rest(good[0]), rest)
                always = min(0.7 * rest, 0.0 if self._is_remote else float(_PASSING_NBYTES))
                rows, spread = (rest - always) / first["rows"], 0.6
        return RidgeRegression(
            {
                "always": Weight(always, max(0.7 * always, states)),
                "rows": Weight(rows, spread * rows, least=0.0),
                "recomputed": Weight(loaded, max(states, 0.03 * self._base_nbytes)),
                "recomputed rows": Weight(0.0, 0.15 * rows),
                "sharded": Weight(mapped, max(states, 0.5 * mapped)),
                "scattered": Weight(0.0, max(states, 0.3 * mapped)),
                "gathering": Weight(0.0, states),
            }
        )

    def _model_nbytes(self) -> int:
        return sum(spec.nbytes for spec in self._model.specs)


def _shared(spec: ParamSpec, ranks: int) -> ParamSpec:
    """About what a rank holds of a parameter that so many share: a part of its first dim, where it is a matrix."""
    if len(spec.shape) < 2:
        return spec
    return ParamSpec(spec.fqn, (-(-spec.shape[0] // ranks), *spec.shape[1:]), spec.dtype, spec.group, spec.trainable)
