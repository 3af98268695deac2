"""`FirstStepProof`: the rewrites of a training, compared with plain torch before its first update.

[Note: Proof at the first step]
Every rank takes part in the first update, has its first micro-batches by then, and has not changed a parameter. There
rank 0 takes whole parameters, and trains copies of the model as it was before its first rewrite: as plain torch, and by
an engine with the same config, both as [Note: Shadow runs] has them. It does so alone, see [Note: Ranks of a proof].
Only what a copy shares with the model can change, so a model with hooks, or with what cannot be copied, is not proven.
Generators get their states back. A failure of these runs is a reason in the log, and never the end of a training; a
finding is, but only where a rewrite is to blame.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from logging import getLogger
from math import prod
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyaccel.accelerators.detect import host_accelerator
from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.config import Config
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import VerificationError
from polyaccel.job.trial_env import TRIAL_VARIABLE
from polyaccel.observability.timing import OUTSIDE
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.fragments import safe_get_full_fp32_param
from polyaccel.torch.api.optimizer_proof import ELEMENTWISE
from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.sharding.tensor_shard import Blocks
from polyaccel.torch.verify.batches import MicroBatch
from polyaccel.torch.verify.copied_trainings import STEPS, Compose, CopiedTrainings, UnfitError
from polyaccel.torch.verify.generators import restore, states_of
from polyaccel.torch.verify.proof_ranks import ProofRanks
from polyaccel.torch.verify.shadow import arithmetic_config
from polyaccel.torch.verify.shrunk_model import ShrunkModel
from polyaccel.torch.verify.stage_batches import StageMicroBatches
from polyaccel.torch.verify.untouched import NotProvenError, Untouched, plain_name
from polyaccel.torch.verify.untouched_pipeline import is_of_layers, untouched_pipeline
from polyaccel.verify.compare import EXACT, Finding
from polyaccel.verify.prove import Proof
from polyaccel.verify.proven import is_proven, keep_proven
from polyaccel.verify.variant import verify_choice
from polyaccel.zero.plan.policy import Placement

log = getLogger(__name__)

_BYTES_OF_PARAMETER = 48
"""Two models with gradients and two states each in float32, the weights, and copies of updates."""
_LARGE, _MOST = 16_000_000, 256_000_000
"""Parameters from which a small model takes the place of one of transformers, and with which others are compared."""
_MOST_FINDINGS = 50
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
        self._shrunk: ShrunkModel | None = None
        self._refusal = ""
        self._numel = sum(parameter.numel() for parameter in model.parameters())
        self._taken: list[MicroBatch] = []
        self._taken_of_stage: StageMicroBatches | None = None
        self._handle: RemovableHandle | None = None
        kinds = set(runtime.communicator.all_gather_object(is_of_layers(model, runtime)))
        if not self._reason and len(kinds) > 1:
            self._reason = "ranks have models of other kinds"
        if not self._reason and kinds == {True}:
            self._untouched, self._reason = untouched_pipeline(model, self._config, runtime, _MOST)
            self._numel = self._numel if self._untouched is None else self._untouched.numel
        elif not self._reason:
            try:
                self._untouched = Untouched.from_model(model, self._config, self._world_size)
            except NotProvenError as error:
                self._reason = error.message
        if not self._reason and self._numel > _LARGE and runtime.communicator.rank == 0:
            try:
                self._shrunk = ShrunkModel(model)
            except NotProvenError as error:
                self._refusal = error.message

    @staticmethod
    def prepare(
        model: nn.Module, config: Config, runtime: EngineBuilder, client: Any, *, has_own_mesh: bool
    ) -> FirstStepProof | None:
        """Return the proof of `model`, which nothing has changed yet; None where the config wants or needs none."""
        choice = verify_choice(config.verify)
        if choice == "off" or TRIAL_VARIABLE in os.environ:  # a trial measures, and trains nothing
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
        gathered = engine.communicator.all_gather_object([names, self._reason, is_known])
        self._names = list(dict.fromkeys(name for found, _, _ in gathered for name in found))
        if gathered[0][2] or not (self._names or self._choice == "always"):
            return
        self._ranks = self._ranks_for(engine)
        reason = next((one for _, one, _ in gathered if one), "") or self._too_large(engine, self._ranks)
        if reason := next(filter(None, engine.communicator.all_gather_object(reason)), ""):
            self._say(engine, reason)
            return
        self._digest = digest
        self._engine, self._compose = ref(engine), compose
        self._most = 1 if isinstance(engine, PipelineEngine) else 2
        if isinstance(engine, PipelineEngine) and is_of_layers(engine.module, engine.runtime):
            self._taken_of_stage = StageMicroBatches(engine)
        else:
            self._handle = engine.register_forward_pre_hook(self._take, with_kwargs=True)
        # A rank may have had no pass at the boundary: then the update reduces, and collectives of the proof come first.
        engine.before_update += [engine.zero.reducer.prepare_update, self._at_update]

    def _ranks_for(self, engine: TorchEngine) -> list[ProofRanks]:
        """The ranks of each comparison. One rank alone has dropout, and several have shards."""
        mesh, stage = engine.mesh, engine.runtime.config.zero_optimization.stage
        if mesh.world_size == mesh.size_of(("data",)) and not mesh.has_several("expert"):
            needs_shards = "optimizer" in self._names or not self._names or stage == 3
            counts = [1] if set(self._names) - {"optimizer"} else []
            if mesh.world_size > 1 and needs_shards:
                counts.append(2)
            return [ProofRanks.from_mesh(self._config, mesh, count) for count in counts or [1]]
        return [ProofRanks.from_mesh(self._config, mesh, 2)]

    def _too_large(self, engine: TorchEngine, ranks: Sequence[ProofRanks]) -> str:
        is_alone = all(rank.mesh.world_size == 1 for rank in ranks)
        accelerator = engine.accelerator if is_alone else host_accelerator(engine.accelerator)
        if self._shrunk is not None or engine.communicator.rank:
            return ""
        stats = accelerator.memory_stats()
        needed = self._numel * max(rank.mesh.world_size for rank in ranks) * _BYTES_OF_PARAMETER
        if self._numel <= _MOST and needed <= (stats.free_nbytes or stats.total_nbytes or 1 << 32) // 2:
            return ""
        return f"{self._numel:,} parameters are too many for one rank {self._refusal}".rstrip()

    def _say(self, engine: TorchEngine, reason: str) -> None:
        if engine.communicator.rank == 0:
            names = ", ".join(self._names)
            log.info("not proven: %s: %s; run `polyaccel verify` on the script", names or "the engine", reason)

    def _take(self, engine: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if engine.training and torch.is_grad_enabled() and len(self._taken) < self._most:
            with suppress(Exception):  # of a class of the user's: then there is no batch
                self._taken.append(MicroBatch.from_arguments(inputs, named))

    def _at_update(self) -> None:
        engine = self._engine()
        assert engine is not None  # it calls
        if self._handle is not None:
            self._handle.remove()
        engine.before_update = [call for call in engine.before_update if call != self._at_update]
        began_s = perf_counter()
        try:
            with engine.timer(OUTSIDE):
                proof = self._prove(engine)
        except NotProvenError as error:
            self._say(engine, error.message)
        else:
            self._conclude(engine, proof, perf_counter() - began_s)
        finally:
            self._untouched = self._shrunk = self._taken_of_stage = None
            self._taken.clear()

    def _conclude(self, engine: TorchEngine, proof: Proof, seconds: float) -> None:
        """Log what was shown. Raises VerificationError where a rewrite is to blame for more than attributes and
        generators, which need not change a number."""
        idle = [name for name in self._names if not proof.acted.get(name)]
        if proof.is_weak:
            self._say(engine, "the model draws other numbers in each run")
        elif proof.findings and proof.blamed and any(finding.kind not in EXACT for finding in proof.findings):
            raise _error_of(proof)
        elif proof.findings:
            self._say(engine, f"{' and '.join(proof.blamed) or 'no single rewrite'} changes {proof.findings[0]}")
        elif idle:
            self._say(engine, f"{', '.join(idle)} changed nothing")
        elif engine.communicator.rank == 0:
            where = "" if self._shrunk is None else ", in a small model of this structure"
            summary = f"{proof.quantities} quantities of {STEPS} steps equal plain torch in float32{where}"
            log.info("proven: %s: %s (%.1f s)", ", ".join(self._names) or "the engine", summary, seconds)
            keep_proven(self._digest, summary)

    def _prove(self, engine: TorchEngine) -> Proof:
        """Compare on small batches, else on those of the training. Collective. Raises NotProvenError on all ranks."""
        ranks = engine.communicator
        wanted = {source for one in self._ranks for source in one.plain().sources}
        of_stages = None
        if self._taken_of_stage is not None and isinstance(engine, PipelineEngine):
            of_stages = self._taken_of_stage.gathered(engine, wanted)
        has_taken = bool(self._taken if of_stages is None else of_stages)
        if not ranks.broadcast_object(has_taken):
            raise NotProvenError("its inputs were not seen, or cannot be copied")
        is_shrunk = ranks.broadcast_object(self._shrunk is not None)
        values = {} if is_shrunk else _whole_values(engine, self._untouched)
        for is_small in (True, False):
            is_large = self._numel > _LARGE and not is_shrunk
            if of_stages is None:
                gathered = self._gathered(engine, wanted, is_small, is_large=is_large)
            else:
                gathered = {
                    rank: pair[0].small(1, is_large=is_large) if is_small else pair for rank, pair in of_stages.items()
                }
            outcome = None
            if ranks.rank == 0:
                with _undisturbed(engine):
                    outcome = self._result(engine, values, gathered)
            result: dict[str, Any] = ranks.broadcast_object(outcome)
            if "proof" in result:
                return _unpacked(result["proof"])
            if not (is_small and result["is_unfit"]):
                break
        raise NotProvenError(result["reason"])

    def _gathered(
        self, engine: TorchEngine, wanted: set[int], is_small: bool, *, is_large: bool
    ) -> dict[int, tuple[MicroBatch, MicroBatch]]:
        """Two micro-batches of each rank of `wanted`, on rank 0. Collective."""
        rank = engine.communicator.rank
        mine = None
        if self._taken and (rank in wanted or rank == 0):
            taken = [one.in_float32() for one in self._taken]
            multiple = engine.mesh.size_of(("sequence",))
            mine = taken[0].small(multiple, is_large=is_large) if is_small else (taken[0], taken[-1])
        sent = [one.packed() for one in mine] if mine is not None and rank else []
        packed = engine.communicator.gather_object(sent)
        if packed is None or mine is None:
            return {}
        long, short = mine
        found = {at: (long.with_packed(both[0]), short.with_packed(both[1])) for at, both in enumerate(packed) if both}
        return {0: mine} | {at: found.get(at, mine) for at in wanted if at}

    def _result(
        self, engine: TorchEngine, values: dict[str, Tensor], batches: dict[int, tuple[MicroBatch, MicroBatch]]
    ) -> dict[str, Any]:
        """What rank 0 found, as a plain value. Raises nothing that the model or the engine of copies raises."""
        untouched = self._untouched
        assert untouched is not None  # else there is no proof
        try:
            proofs = []
            if self._shrunk is not None:
                untouched = Untouched.from_model(self._shrunk.module, self._config, self._world_size)
                values = self._shrunk.values(engine.device)
                batches = {rank: (self._shrunk.batch(a), self._shrunk.batch(b)) for rank, (a, b) in batches.items()}
            for one in self._ranks:
                trainings = CopiedTrainings(untouched, one, self._compose, engine, values, batches)
                proofs.append(trainings.prove())
        except NotProvenError as error:
            return {"reason": error.message, "is_unfit": isinstance(error, UnfitError)}
        except Exception as error:  # training does not depend on it
            log.debug("a proof failed", exc_info=True)
            return {"reason": f"the proof failed: {type(error).__name__}: {error}"[:240], "is_unfit": False}
        return {"proof": _packed(proofs)}


def _packed(proofs: Sequence[Proof]) -> dict[str, Any]:
    """Several proofs as one plain value: the findings of the first that has some."""
    first = next((one for one in proofs if not one.is_proven), proofs[0])
    acted: dict[str, int] = {}
    for name, count in (pair for one in proofs for pair in one.acted.items()):
        acted[name] = max(count, acted.get(name, 0))
    return {
        "findings": [[one.key, one.found, one.wanted, one.spreads] for one in first.findings[:_MOST_FINDINGS]],
        "differing": list(first.differing[:_MOST_FINDINGS]),
        "blamed": list(first.blamed),
        "acted": acted,
        "worst": max(one.worst for one in proofs),
        "limit": first.limit,
        "quantities": sum(one.quantities for one in proofs),
        "loss_noise": max(float(one.loss_noise) for one in proofs),
    }


def _unpacked(tree: dict[str, Any]) -> Proof:
    found = tuple(Finding(*one) for one in tree.pop("findings"))
    differing, blamed = (tuple(tree.pop(name)) for name in ("differing", "blamed"))
    return Proof(found, differing, blamed, **tree)


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


def _whole_values(engine: TorchEngine, untouched: Untouched | None) -> dict[str, Tensor]:
    """All parameters of the `untouched` module of rank 0, whole, in float32 on its device; nothing on other ranks.
    Collective."""
    ranks = engine.communicator
    specs = {spec.fqn: spec for spec in engine.adapter.param_specs()}
    blocks = Blocks(specs, engine._stage_runtime.process_group_for)
    found: dict[str, Tensor] = {}
    for stated, parameter in engine.module.named_parameters():
        name = plain_name(stated)
        if (value := safe_get_full_fp32_param(parameter)) is not None:
            found[name] = blocks.gather_full(name, value)
    named = () if untouched is None else untouched.module.named_parameters()
    wanted: dict[str, list[int]] = ranks.broadcast_object({name: list(one.shape) for name, one in named})
    misfits = [name for name, one in found.items() if name in wanted and one.shape.numel() != prod(wanted[name])]
    owners = ranks.all_gather_object([list(found), misfits])
    if misfits := [name for _, names in owners for name in names]:
        raise NotProvenError(f"{misfits[0]} has another shape on each rank")
    for name, shape in wanted.items():
        rank = next((rank for rank, (names, _) in enumerate(owners) if name in names), None)
        if rank is None:
            raise NotProvenError(f"the engine has no parameter {name}")
        if rank == 0 or not prod(shape):
            continue
        if ranks.rank == rank:
            ranks.send(wrap_torch(found[name].reshape(-1).contiguous()), 0, label="values for a proof")
        elif ranks.rank == 0:
            flat = torch.empty(prod(shape), dtype=torch.float32, device=engine.device)
            ranks.recv(wrap_torch(flat), rank, label="values for a proof")
            found[name] = flat
    if ranks.rank:
        return {}
    return {name: found[name].detach() if prod(shape) else torch.empty(shape) for name, shape in wanted.items()}


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
    states = states_of(engine.device)
    try:
        yield
    finally:
        restore(states, engine.device)
