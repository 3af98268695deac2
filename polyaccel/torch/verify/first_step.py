"""`FirstStepProof`: the rewrites of a training, compared with plain torch before its first update.

[Note: Proof at the first step]
Every rank takes part in the first update, has its first micro-batches by then, and has not changed a parameter. There
the engine takes whole parameters, and trains copies of the model as it was before its first rewrite: as plain torch,
and by an engine with the same config, both as [Note: Shadow runs] has them. Only what a copy shares with the model can
change, so a model with hooks, or with what cannot be copied, is not proven. Generators get their states back. Each rank
compares its own quantities, and all of them agree on findings and failures before the next collective. A failure of
these runs is a reason in the log, and never the end of a training; a finding is, but only where a rewrite is to blame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import getLogger
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.config import Config
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import CommError, VerificationError
from polyaccel.observability.timing import OUTSIDE
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.fragments import safe_get_full_fp32_param
from polyaccel.torch.api.optimizer_proof import ELEMENTWISE
from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.sharding.tensor_shard import Blocks
from polyaccel.torch.verify.batches import MicroBatch
from polyaccel.torch.verify.copied_trainings import STEPS, Compose, CopiedTrainings, UnfitError
from polyaccel.torch.verify.generators import has_own_generators, restore, states_of
from polyaccel.torch.verify.shadow import arithmetic_config
from polyaccel.torch.verify.untouched import NotProvenError, Untouched
from polyaccel.verify.compare import EXACT
from polyaccel.verify.prove import Proof
from polyaccel.verify.proven import is_proven, keep_proven
from polyaccel.verify.variant import verify_choice
from polyaccel.zero.plan.policy import Placement

log = getLogger(__name__)

_BYTES_OF_PARAMETER = 48
"""Two models with gradients and two states each in float32, the weights, and copies of updates."""
_CHANGES_MODEL = {
    "pipeline": "use fewer stages",
    "tensor_parallel": "leave tensor ranks out of the mesh, or keep that layer whole",
    "expert_parallel": "leave expert ranks out of the mesh",
    "sequence_parallel": "leave sequence ranks out of the mesh",
    "tiled_compute": 'set "tiled_compute": {"enabled": false}',
    "activation_checkpointing": "leave the recomputation of that module out",
    "optimizer": "use stage 0, where the optimizer has whole tensors",
    "zero_optimization": "use stage 0, where the optimizer has whole tensors",
}
"""Rewrites that are proven, with their cures. ZeRO with an elementwise optimizer is exact by construction."""


class FirstStepProof:
    """The proof of one engine. See [Note: Proof at the first step]."""

    def __init__(self, model: nn.Module, config: Config, runtime: EngineBuilder, choice: str, *, has_own_mesh: bool):
        self._choice = choice
        self._config = arithmetic_config(config)
        self._world_size = runtime.communicator.world_size
        self._untouched: Untouched | None = None
        self._reason = "the script brought its own groups" if has_own_mesh else ""
        self._numel = sum(one.numel() for one in model.parameters())
        self._taken: list[MicroBatch] = []
        self._handle: RemovableHandle | None = None
        if not self._reason:
            try:
                self._untouched = Untouched.of(model, self._config, self._world_size)
            except NotProvenError as error:
                self._reason = error.message

    @staticmethod
    def prepare(
        model: nn.Module, config: Config, runtime: EngineBuilder, client: Any, *, has_own_mesh: bool
    ) -> FirstStepProof | None:
        """Return the proof of `model`, which nothing has changed yet; None where the config wants or needs none."""
        choice = verify_choice(config.verify)
        if choice == "off":
            return None
        tested = client is None or type(client) in ELEMENTWISE or runtime.policy.optim is not Placement.SHARDED
        axes = any(runtime.mesh.has_several(axis) for axis in ("pipe", "tensor", "expert", "sequence"))
        sections = runtime.config.tiled_compute.enabled or runtime.config.activation_checkpointing.enabled
        if tested and not axes and not sections and choice != "always":
            return None
        return FirstStepProof(model, config, runtime, choice, has_own_mesh=has_own_mesh)

    def attach(self, engine: TorchEngine, compose: Compose) -> None:
        """Let the first update of `engine` be proven, unless it was in an earlier run. Collective."""
        optimizer = engine.zero.optimizer
        if optimizer is None or (isinstance(optimizer, ClientOptimizer) and optimizer.evaluates):
            return
        names = [one.name for one in engine.rewrites if one.name in _CHANGES_MODEL and _is_subject(one.name, engine)]
        digest = "" if self._untouched is None else self._untouched.digest + _optimizer_facts(engine)
        is_known = self._choice == "auto" and bool(digest) and engine.communicator.rank == 0 and is_proven(digest)
        gathered = engine.communicator.all_gather_object([names, self._reason or self._too_large(engine), is_known])
        self._names = list(dict.fromkeys(name for found, _, _ in gathered for name in found))
        if gathered[0][2] or not (self._names or self._choice == "always"):
            return
        if reasons := [reason for _, reason, _ in gathered if reason]:
            self._say(engine, reasons[0])
            return
        self._digest = digest
        self._engine, self._compose = ref(engine), compose
        self._most = 1 if isinstance(engine, PipelineEngine) else 2
        self._handle = engine.register_forward_pre_hook(self._take, with_kwargs=True)
        engine.before_update.append(self._at_update)

    def _too_large(self, engine: TorchEngine) -> str:
        stats, on_host = engine.accelerator.memory_stats(), engine.accelerator.works_on_host_memory
        needed = self._numel * _BYTES_OF_PARAMETER * (self._world_size if on_host else 1)
        if needed <= (stats.free_nbytes or stats.total_nbytes or 1 << 32) // 2:
            return ""
        return f"the whole model of {self._numel:,} parameters does not fit one rank several times"

    def _say(self, engine: TorchEngine, reason: str) -> None:
        if engine.communicator.rank == 0:
            names = ", ".join(self._names)
            log.info("not proven: %s: %s; run `polyaccel verify` on the script", names or "the engine", reason)

    def _take(self, engine: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if engine.training and torch.is_grad_enabled() and len(self._taken) < self._most:
            with suppress(Exception):  # of a class of the user's: then there is no batch
                self._taken.append(MicroBatch.of(inputs, named))

    def _at_update(self) -> None:
        engine = self._engine()
        assert engine is not None  # it calls
        if self._handle is not None:
            self._handle.remove()
        engine.before_update = [call for call in engine.before_update if call != self._at_update]
        began_s = perf_counter()
        try:
            with engine.timer(OUTSIDE), _undisturbed(engine):
                proof = self._prove(engine)
        except CommError:
            raise
        except NotProvenError as error:
            self._say(engine, error.message)
        except Exception as error:  # training does not depend on it
            log.debug("a proof failed", exc_info=True)
            self._say(engine, f"the proof failed: {type(error).__name__}: {error}"[:240])
        else:
            self._conclude(engine, proof, perf_counter() - began_s)
        self._untouched = None
        self._taken.clear()

    def _conclude(self, engine: TorchEngine, proof: Proof, seconds: float) -> None:
        """Log what was shown. Raises VerificationError where a rewrite is to blame for more than attributes and
        generators, which need not change a number."""
        weak = any(engine.communicator.all_gather_object(proof.is_weak))
        idle = [name for name in self._names if not proof.acted.get(name)]
        if weak:
            self._say(engine, "the model draws other numbers in each run")
        elif proof.findings and proof.blamed and any(one.kind not in EXACT for one in proof.findings):
            raise _error_of(proof)
        elif proof.findings:
            self._say(engine, f"{' and '.join(proof.blamed) or 'no single rewrite'} changes {proof.findings[0]}")
        elif idle:
            self._say(engine, f"{', '.join(idle)} changed nothing")
        elif engine.communicator.rank == 0:
            summary = f"{proof.quantities} quantities of {STEPS} steps equal plain torch in float32"
            log.info("proven: %s: %s (%.1f s)", ", ".join(self._names) or "the engine", summary, seconds)
            keep_proven(self._digest, summary)

    def _prove(self, engine: TorchEngine) -> Proof:
        """Compare on small batches, else on those of the training. Collective."""
        ranks = engine.communicator
        counts = ranks.all_gather_object(len(self._taken))
        if not min(counts):
            raise NotProvenError("its inputs were not seen, or cannot be copied")
        assert self._untouched is not None  # else there is no proof
        values = _whole_values(engine, self._untouched)
        taken = [one.in_float32() for one in self._taken[: min(counts)]]
        is_several = engine.gradient_accumulation_steps() > 1 or isinstance(engine, PipelineEngine)
        long, short = taken[0].small(engine.mesh.size_of(("sequence",)))
        first, last = taken[0], taken[-1]
        reason = ""
        for pair in ((long, short), (first, last)):
            steps = [[*pair], [*reversed(pair)]] if is_several else [[pair[0]], [pair[1]]]
            try:
                return CopiedTrainings(self._untouched, self._config, self._compose, engine, values, steps).prove()
            except UnfitError as error:
                reason = error.message
        raise NotProvenError(reason)


def _is_subject(name: str, engine: TorchEngine) -> bool:
    """Whether a rewrite of this name is to be proven: the optimizer only where it is not known to be elementwise."""
    if name == "zero_optimization":
        return False
    optimizer = engine.zero.optimizer
    if name != "optimizer":
        return True
    is_sharded = engine.runtime.policy.optim is Placement.SHARDED
    return is_sharded and isinstance(optimizer, ClientOptimizer) and type(optimizer.optimizer) not in ELEMENTWISE


def _optimizer_facts(engine: TorchEngine) -> str:
    """What a digest has of the optimizer."""
    optimizer = engine.zero.optimizer
    kind = "" if optimizer is None else optimizer.kind
    groups = [
        sorted((key, str(value)) for key, value in group.items() if key != "params" and "lr" not in key)
        for group in engine.optimizer.param_groups
    ]
    return hashlib.sha256(f"{kind} {groups}".encode()).hexdigest()


def _whole_values(engine: TorchEngine, untouched: Untouched) -> dict[str, Tensor]:
    """All parameters, whole, in float32 on this rank's device, in the order of the untouched module. Collective."""
    specs = {spec.fqn: spec for spec in engine.adapter.param_specs()}
    blocks = Blocks(specs, engine._stage_runtime.process_group_for)
    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if (value := safe_get_full_fp32_param(parameter)) is not None:
            found[name] = blocks.gather_full(name, value)
    wanted = dict(untouched.module.named_parameters())
    owners = engine.communicator.all_gather_object(list(found))
    for name, one in wanted.items():
        rank = next((rank for rank, names in enumerate(owners) if name in names), None)
        if rank is None:
            raise NotProvenError(f"the engine has no parameter {name}")
        if all(name in names for names in owners):
            continue
        flat = found[name].reshape(-1).contiguous() if name in found else torch.empty(one.numel(), device=engine.device)
        engine.communicator.broadcast(wrap_torch(flat), rank)
        found[name] = flat.view(one.shape)
    misfits = [name for name, one in wanted.items() if found[name].numel() != one.numel()]
    if misfits := [name for names in engine.communicator.all_gather_object(misfits) for name in names]:
        raise NotProvenError(f"{misfits[0]} has another shape on each rank")
    return {name: found[name].detach() for name in wanted}


def _error_of(proof: Proof) -> VerificationError:
    first, names = proof.findings[0], " and ".join(proof.blamed)
    module = first.name.rpartition(".")[0]
    where = f" (module {module})" if module else ""
    cures = "; ".join(_CHANGES_MODEL[name] for name in proof.blamed if name in _CHANGES_MODEL)
    return VerificationError(
        f"{names} computes other numbers than plain torch: {first.kind} {first.name}{where} of step {first.step} is "
        f"{first.found:.6g}, not {first.wanted:.6g}",
        hint=f'{cures}; compare with `polyaccel verify`; "verify": "off" trains all the same',
        value=first.name,
    )


@contextmanager
def _undisturbed(engine: TorchEngine) -> Iterator[None]:
    """Give the generators their states back."""
    if not has_own_generators():
        engine.communicator.barrier()  # no thread draws until all have the states
    states = states_of(engine.device)
    if not has_own_generators():
        engine.communicator.barrier()
    try:
        yield
    finally:
        restore(states, engine.device)
