"""`CopiedTrainings`: the runs of a proof at the first step, on copies of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from logging import WARNING, getLogger
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyaccel.comm.default import default_communicator
from polyaccel.config import load_config
from polyaccel.engine.runtime import EngineBuilder, build
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.optimizer import ParamGroups
from polyaccel.torch.api.optimizer_proof import twin_of
from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.verify.batches import MicroBatch, scalar_of
from polyaccel.torch.verify.generators import has_own_generators, restore, states_of
from polyaccel.torch.verify.plain_engine import PlainEngine, has_equivalent
from polyaccel.torch.verify.proof_ranks import ProofRanks
from polyaccel.torch.verify.runs import record_steps, verified_config
from polyaccel.torch.verify.shadow import ChoiceWatch, OtherOrder, WithoutDropout
from polyaccel.torch.verify.untouched import NotProvenError, Untouched, plain_name
from polyaccel.verify.prove import Proof, prove
from polyaccel.verify.variant import ActiveRun, Record, Variant, VerificationEnd

STEPS = 2
_BINS = 4093
Compose = Callable[[nn.Module, EngineBuilder, Any, ParamGroups | None, frozenset[str]], TorchEngine]
"""Builds an engine of a module with an optimizer, or groups for the config's, and without some rewrites. Collective."""
Batches = Mapping[int, Sequence[MicroBatch]]
"""The micro-batches of a step and of the next, by the rank of the job that has them."""


class UnfitError(NotProvenError):
    """A batch shows nothing: plain torch fails on it, or its loss is not finite."""


class CopiedTrainings:
    """The runs of one proof, on this process alone. See [Note: Ranks of a proof]."""

    def __init__(
        self,
        untouched: Untouched,
        ranks: ProofRanks,
        compose: Compose,
        engine: TorchEngine,
        values: Mapping[str, Tensor],
        batches: Batches,
    ) -> None:
        self._untouched, self._compose = untouched, compose
        self._engine, self._values = engine, values
        self._is_staged = isinstance(engine, PipelineEngine)
        self._is_threaded = ranks.mesh.world_size > 1 or not has_own_generators()
        self._generators = states_of(engine.device)
        self._deepcopies = Lock()
        passes = _passes_of(engine)
        self._batches = {
            rank: [[pair[at % 2] for at in range(passes)], [pair[(at + 1) % 2] for at in range(passes)]]
            for rank, pair in batches.items()
        }
        changes: dict[str, Any] = {
            "train_batch_size": None,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": passes,
        }
        self._client = client_of(engine)
        has_client = self._client is not None
        self._has_adamw = (self._is_staged and has_client) or not has_equivalent(ranks.config, has_client=has_client)
        """Whether AdamW takes the place of an optimizer that cannot be compared: the other rewrites are the same."""
        if self._has_adamw:
            changes["optimizer"] = load_config({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}).optimizer
            self._client = None
        changed = ranks.config.model_copy(update=changes)
        self._ranks = ProofRanks(changed, ranks.mesh, ranks.sources)
        self._plain_ranks = self._ranks.plain()

    def prove(self) -> Proof:
        """Compare. Raises NotProvenError."""
        return prove(self._run, variant=Variant("", steps=STEPS, bins=_BINS))

    def _run(self, variant: Variant) -> list[Record]:
        """The records of a run's ranks. Raises NotProvenError where one of them failed."""
        restore(self._generators, self._engine.device)
        active, ranks = ActiveRun(variant), self._plain_ranks if variant.is_plain else self._ranks

        def program(rank: int) -> None:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(torch.autocast(self._engine.device.type, enabled=False))
                if self._is_threaded:
                    stack.enter_context(WithoutDropout())
                if variant.reorders:
                    stack.enter_context(OtherOrder())
                if variant.noise:
                    stack.enter_context(ChoiceWatch(active.record_of(rank)))
                with suppress(VerificationEnd):
                    run = self._run_plain if variant.is_plain else self._run_engine
                    run(active, ranks, self._batches[ranks.sources[rank]])

        try:
            with _quiet():
                ranks.run(program, self._engine.accelerator)
        except NotProvenError:
            raise
        except Exception as error:
            failure = f"the run {variant.name!r} failed: {type(error).__name__}: {str(error)[:200]}"
            raise NotProvenError(failure) from None  # whose frames hold the copies
        records = [active.records[rank] for rank in sorted(active.records)]
        if variant.is_plain:
            self._require_numbers(records)
        return records

    def _run_plain(self, active: ActiveRun, ranks: ProofRanks, steps: Sequence[Sequence[MicroBatch]]) -> None:
        model = self._model()
        runtime = build(verified_config(ranks.config, model, active.variant))
        client, groups = self._optimizer_for(model)
        engine = PlainEngine(active, model, runtime, client, groups, records_draws=not self._is_threaded)
        if self._is_staged:
            engine.train()
        may_stand_in = not self._is_staged and self._ranks.mesh.size_of(("sequence",)) == 1
        for micro_batches in steps:
            for batch in micro_batches:
                try:
                    engine.backward(scalar_of(batch.call(engine, engine.device), may_stand_in=may_stand_in))
                except NotProvenError:
                    raise
                except Exception as error:
                    reason = f"plain torch cannot run its first micro-batch: {type(error).__name__}: {error}"
                    raise UnfitError(reason[:240]) from None
                engine.step()

    def _run_engine(self, active: ActiveRun, ranks: ProofRanks, steps: Sequence[Sequence[MicroBatch]]) -> None:
        variant = active.variant
        place = self._ranks.mesh.coordinates(default_communicator().rank)
        model = self._model(None if "pipeline" in variant.without else place.get("pipe", 0))
        runtime = build(verified_config(ranks.config, model, variant))
        runtime.enter_groups()
        client, groups = self._optimizer_for(model)
        engine = None
        try:
            engine = self._compose(model, runtime, client, groups, frozenset(variant.without))
            record_steps(active, engine)
            if self._is_staged:
                engine.train()
            for micro_batches in steps:
                if isinstance(engine, PipelineEngine):
                    engine.train_batch(iter([batch.for_train_batch() for batch in micro_batches]))
                    continue
                for batch in micro_batches:
                    engine.backward(scalar_of(batch.call(engine, engine.device), may_stand_in=True))
                    engine.step()
        finally:
            with suppress(Exception):  # another rank failed
                if engine is not None:
                    engine.destroy()
            with suppress(Exception):
                runtime.leave_groups()  # whose registry holds them

    def _model(self, stage: int | None = None) -> nn.Module:
        """A copy of the model, or what a `stage` trains."""
        with self._deepcopies:  # classes of users need not be copied by several threads
            return self._untouched.with_values(self._values, self._engine.module, stage)

    def _optimizer_for(self, model: nn.Module) -> tuple[Any, ParamGroups | None]:
        """The training's optimizer for a copy of the model, without states."""
        own = dict(model.named_parameters())
        names = {id(one): plain_name(name) for name, one in self._engine.module.named_parameters()}
        groups = self._engine.optimizer.param_groups
        copies = [[own[names[id(one)]] for one in group["params"] if names.get(id(one)) in own] for group in groups]
        if self._client is not None:
            pairs = [(id(one), names.get(id(one))) for group in groups for one in group["params"]]
            members = {key: own[name] for key, name in pairs if name in own}
            return twin_of(self._client, members, members), None
        if self._is_staged:  # the groups have the parameters of one stage
            return None, None
        if self._has_adamw:
            return None, [{"params": copied} for copied in copies]
        return None, [{**group, "params": copied} for group, copied in zip(groups, copies, strict=True)]

    def _require_numbers(self, records: Sequence[Record]) -> None:
        """Raise UnfitError for losses and norms that show nothing."""
        for record in records:
            for step in range(STEPS):
                loss, norm = (float(record.values.get(f"{step}/{kind}/", np.nan)) for kind in ("loss", "norm"))
                if not (np.isfinite(loss) and np.isfinite(norm) and norm > 0):
                    raise UnfitError(f"a loss of {loss} with gradients of norm {norm} shows nothing")
        if self._is_threaded and has_own_generators():
            now = states_of(self._engine.device)
            if not torch.equal(now[0], self._generators[0]):
                raise NotProvenError("the model draws random numbers other than dropout, and ranks draw others")


def _passes_of(engine: TorchEngine) -> int:
    """The micro-batches of a step: several where the training has several, as many as a schedule needs."""
    steps = engine.gradient_accumulation_steps()
    if not isinstance(engine, PipelineEngine):
        return min(2, steps)
    for count in (2, engine.num_stages, 2 * engine.num_stages):
        with suppress(PipelineError):  # the schedule has no table for them
            engine._programs.table(count)
            return count
    return steps


def client_of(engine: TorchEngine) -> torch.optim.Optimizer | None:
    """Return the script's own optimizer."""
    optimizer = engine.zero.optimizer
    return optimizer.optimizer if isinstance(optimizer, ClientOptimizer) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what engines of copies log below a warning to themselves."""
    logger = getLogger("polyaccel")
    level = logger.level
    logger.setLevel(max(WARNING, level))
    try:
        yield
    finally:
        logger.setLevel(level)
