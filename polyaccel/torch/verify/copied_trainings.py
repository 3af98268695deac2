"""`CopiedTrainings`: the runs of a proof at the first step, on copies of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from logging import WARNING, getLogger
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyaccel.config import Config, load_config
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import CommError
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.optimizer import ParamGroups
from polyaccel.torch.api.optimizer_proof import twin_of
from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.verify.batches import MicroBatch, scalar_of
from polyaccel.torch.verify.generators import has_own_generators, restore, states_of
from polyaccel.torch.verify.plain_engine import PlainEngine, has_equivalent
from polyaccel.torch.verify.runs import record_steps, shares_samples, verified_config
from polyaccel.torch.verify.shadow import OtherOrder, WithoutDropout
from polyaccel.torch.verify.untouched import NotProvenError, Untouched
from polyaccel.verify.compare import Finding, in_order
from polyaccel.verify.prove import Proof, prove
from polyaccel.verify.variant import ActiveRun, Record, Variant, VerificationEnd

STEPS = 2
_BINS = 4093
_MOST_FINDINGS = 50
Compose = Callable[[nn.Module, EngineBuilder, Any, ParamGroups | None, frozenset[str]], TorchEngine]
"""Builds an engine of a module with an optimizer, or groups for the config's, and without some rewrites. Collective."""


class UnfitError(NotProvenError):
    """A batch shows nothing: plain torch fails on it, or its loss is not finite. Raised on all ranks."""


class CopiedTrainings:
    """The runs of one proof: `steps` has the micro-batches of each."""

    def __init__(
        self,
        untouched: Untouched,
        config: Config,
        compose: Compose,
        engine: TorchEngine,
        values: Mapping[str, Tensor],
        steps: Sequence[Sequence[MicroBatch]],
    ) -> None:
        self._untouched, self._compose = untouched, compose
        self._engine, self._values, self._steps = engine, values, steps
        self._ranks = engine.communicator
        self._is_staged = isinstance(engine, PipelineEngine)
        self._shares = shares_samples(engine.runtime)
        self._generators = states_of(engine.device)
        changed = config.model_copy(
            update={
                "train_batch_size": None,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": len(steps[0]),
            }
        )
        self._client = client_of(engine)
        has_client = self._client is not None
        self._has_adamw = (self._is_staged and has_client) or not has_equivalent(config, has_client=has_client)
        """Whether AdamW takes the place of an optimizer that cannot be compared: the other rewrites are the same."""
        if self._has_adamw:
            adamw = load_config({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}).optimizer
            changed = changed.model_copy(update={"optimizer": adamw})
            self._client = None
        self._config = changed

    def prove(self) -> Proof:
        """Compare. Raises NotProvenError on all ranks."""
        names = list(self._values)
        return prove(self._run, variant=Variant("", steps=STEPS, bins=_BINS), all_findings=partial(self._merge, names))

    def _merge(self, names: Sequence[str], findings: Sequence[Finding]) -> list[Finding]:
        """The findings of all ranks."""
        own = [[one.key, one.found, one.wanted, one.spreads] for one in findings[:_MOST_FINDINGS]]
        gathered = self._ranks.all_gather_object(own)
        by_key = {key: Finding(key, *rest) for found in gathered for key, *rest in found}
        return in_order(by_key.values(), names)

    def _run(self, variant: Variant) -> list[Record]:
        """This rank's record of a run. Raises NotProvenError on all ranks where one failed."""
        restore(self._generators, self._engine.device)
        active, failure = ActiveRun(variant), ""
        with ExitStack() as stack:
            if has_own_generators():
                stack.enter_context(_quiet())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(self._engine.device.type, enabled=False))
            if self._shares or not has_own_generators():
                stack.enter_context(WithoutDropout())
            if variant.reorders:
                stack.enter_context(OtherOrder())
            try:
                (self._run_plain if variant.is_plain else self._run_engine)(active)
            except VerificationEnd:
                pass
            except (CommError, NotProvenError):
                raise
            except Exception as error:
                failure = f"the run {variant.name!r} failed: {type(error).__name__}: {str(error)[:200]}"
        self._require_success(failure)
        record = active.record_of(self._ranks.rank)
        self._exchange(record)
        if variant.is_plain:
            self._require_numbers(record)
        return [record]

    def _run_plain(self, active: ActiveRun) -> None:
        model = self._model()
        runtime = self._engine.runtime.with_config(verified_config(self._config, model, active.variant))
        client, groups = self._optimizer_for(model)
        engine = PlainEngine(active, model, runtime, client, groups)
        if self._is_staged:
            engine.train()
        may_stand_in = not self._is_staged and not runtime.mesh.has_several("sequence")
        for micro_batches in self._steps:
            for batch in micro_batches:
                failure = ""
                try:
                    engine.backward(scalar_of(batch.call(engine), may_stand_in=may_stand_in))
                except Exception as error:
                    failure = f"plain torch cannot run its first micro-batch: {type(error).__name__}: {error}"[:240]
                    if isinstance(error, NotProvenError):
                        failure = error.message
                if failures := [one for one in self._ranks.all_gather_object(failure) if one]:
                    raise UnfitError(failures[0])
                engine.step()

    def _run_engine(self, active: ActiveRun) -> None:
        model = self._model()
        variant = active.variant
        runtime = self._engine.runtime.with_config(verified_config(self._config, model, variant))
        client, groups = self._optimizer_for(model)
        engine = self._compose(model, runtime, client, groups, frozenset(variant.without))
        try:
            record_steps(active, engine)
            if self._is_staged:
                engine.train()
            for micro_batches in self._steps:
                if isinstance(engine, PipelineEngine):
                    engine.train_batch(iter([batch.for_train_batch() for batch in micro_batches]))
                    continue
                for batch in micro_batches:
                    engine.backward(scalar_of(batch.call(engine), may_stand_in=True))
                    engine.step()
        finally:
            engine.destroy()
            stage = engine._stage_runtime
            if stage is not engine.runtime:
                for group in stage._groups.values():
                    group.close()

    def _model(self) -> nn.Module:
        return self._untouched.with_values(self._values, self._engine.module)

    def _optimizer_for(self, model: nn.Module) -> tuple[Any, ParamGroups | None]:
        """The training's optimizer for a copy of the model, without states."""
        own = dict(model.named_parameters())
        names = {id(one): name for name, one in self._engine.module.named_parameters()}
        groups = self._engine.optimizer.param_groups
        if self._client is not None:
            members = {id(one): own[names[id(one)]] for group in groups for one in group["params"] if id(one) in names}
            return twin_of(self._client, members, members), None
        if self._is_staged:  # the groups have the parameters of one stage
            return None, None
        if self._has_adamw:
            return None, [{"params": [own[names[id(one)]] for one in group["params"]]} for group in groups]
        return None, [{**group, "params": [own[names[id(one)]] for one in group["params"]]} for group in groups]

    def _require_success(self, failure: str) -> None:
        if failures := [one for one in self._ranks.all_gather_object(failure) if one]:
            raise NotProvenError(failures[0])

    def _exchange(self, record: Record) -> None:
        """Average the losses of all ranks, and let each have the rewrites of all."""
        losses = {key: float(value) for key, value in record.values.items() if key.split("/", 2)[1] == "loss"}
        gathered = self._ranks.all_gather_object([losses, record.acted])
        for key in losses:
            record.values[key] = np.asarray(np.mean([one[key] for one, _ in gathered if key in one]))
        for name, count in [pair for _, acted in gathered for pair in acted.items()]:
            record.acted[name] = max(record.acted.get(name, 0), count)
        record.acted = dict(sorted(record.acted.items()))

    def _require_numbers(self, record: Record) -> None:
        """Raise UnfitError for losses and norms that show nothing, the same on all ranks."""
        for step in range(STEPS):
            loss, norm = (float(record.values.get(f"{step}/{kind}/", np.nan)) for kind in ("loss", "norm"))
            if not (np.isfinite(loss) and np.isfinite(norm) and norm > 0):
                raise UnfitError(f"a loss of {loss} with gradients of norm {norm} shows nothing")
        if self._shares and has_own_generators():
            now = states_of(self._engine.device)
            drew = not torch.equal(now[0], self._generators[0])
            if any(self._ranks.all_gather_object(drew)):
                raise NotProvenError("the model draws random numbers, and ranks that share a sample draw others")


def client_of(engine: TorchEngine) -> torch.optim.Optimizer | None:
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
