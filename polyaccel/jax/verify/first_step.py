"""`FirstStepProof`: the rewrites of a training, compared with plain JAX before its first update.

[Note: Proof before training]
Every rank takes part in the first training, and has its first batch there. The engine then trains two steps from the
weights that it was built from: as plain JAX, and by an engine with the same config in float32, both as [Note: Shadow
runs] of `polyaccel.verify.variant` has them. These runs have their own copy of a carried state. So nothing of the
training changes, but what the function itself changes while it is traced. All ranks agree on findings and failures
before the next collective. A failure of these runs is a reason in the log, and never the end of a training; a finding
is.
"""

from __future__ import annotations

import hashlib
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from itertools import cycle, islice
from logging import WARNING, getLogger
from time import perf_counter
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.config import Config
from polyaccel.errors import CommError, PolyaccelError, VerificationError
from polyaccel.jax.engine import JaxEngine
from polyaccel.jax.program.batches import as_inputs
from polyaccel.jax.pytree import named_leaves
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.jax.verify.plain_engine import PlainJaxEngine
from polyaccel.jax.verify.plain_programs import PlainPrograms
from polyaccel.jax.verify.runs import (
    SLICES,
    acted_of,
    config_without,
    float32_config,
    has_plain_update,
    record_engine,
    switch_off,
)
from polyaccel.verify.compare import Finding, in_order
from polyaccel.verify.prove import Proof, prove
from polyaccel.verify.proven import is_proven, keep_proven
from polyaccel.verify.variant import ActiveRun, Record, Variant, VerificationEnd, verify_choice
from polyaccel.zero.plan.policy import Placement

log = getLogger(__name__)

STEPS = 2
_BINS = 4093
_MOST_FINDINGS = 50
_BYTES_OF_PARAMETER = 48
"""Two models with gradients and two states each in float32, the weights, and copies of updates."""
_ON_MESH = "the program on the mesh"
_CURES = {
    "pipeline": "use fewer stages",
    "activation_checkpointing": "leave the recomputation of units out",
    "jax": 'declare what has no axis over samples polyaccel.jax.replicated, or use "jax": {"execution": "views"}',
    "gradient_accumulation_steps": "declare what has no axis over samples polyaccel.jax.replicated, or pass an "
    "iterator of micro-batches",
    "zero_optimization": "use stage 0",
    "model": "pass a function fn(params, batch, rng) in place of the module",
    _ON_MESH: "leave mesh= and axes of the config out",
    SLICES: "use stage 0 and views mode, where the transformation gets whole parameters",
}
"""Rewrites that are proven, with their cures. ZeRO below stage 3 with the config's optimizer is exact by construction,
for the function does not see it."""
_ARITHMETIC = frozenset(
    {
        *("accelerator", "comm", "optimizer", "gradient_clipping", "gradient_allreduce_op", "prescale_gradients"),
        *("gradient_predivide_factor", "zero_optimization", "activation_checkpointing", "pipeline", "mesh", "jax"),
        *("data_parallel_size", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    }
)
Compose = Callable[[RewriteContext], JaxEngine]
"""Builds an engine of what was given. Collective."""


class NotProvenError(PolyaccelError):
    """Nothing can be proven of a training. The message is the reason."""


class FirstStepProof:
    """The proof of one engine. See [Note: Proof before training]."""

    def __init__(self, given: RewriteContext, config: Config, choice: str) -> None:
        default = Config()
        rest = {name: getattr(default, name) for name in Config.model_fields if name not in _ARITHMETIC}
        self._config = config.model_copy(update={**rest, "verify": "off"})
        self._choice = choice
        self._given = replace(given, applied=[])
        self._names: list[str] = []
        self._digest = ""

    @staticmethod
    def prepare(given: RewriteContext, config: Config) -> FirstStepProof | None:
        """Return the proof of what was `given`, before its first rewrite; None where the config wants none."""
        choice = verify_choice(config.verify)
        has_optimizer = given.client is not None or config.optimizer is not None
        return None if choice == "off" or not has_optimizer else FirstStepProof(given, config, choice)

    def attach(self, engine: JaxEngine, compose: Compose) -> None:
        """Let the first training of `engine` begin with the proof, if it has something to prove."""
        found = acted_of(engine)
        self._names = [name for name in _CURES if name in found and self._is_subject(name, engine)]
        if not self._names and self._choice != "always":
            return
        if reason := self._too_large(engine):
            self._say(engine, reason)
            return
        self._engine, self._compose = ref(engine), compose
        engine.before_training = self._at_first_batch

    def _is_subject(self, name: str, engine: JaxEngine) -> bool:
        if name == "zero_optimization":
            return engine.runtime.policy.params is Placement.SHARDED
        if name == "model":  # whose blocks are units, where something acts on units
            return self._is_subject("zero_optimization", engine) or engine._rewrites.recomputation is not None
        return True

    def _too_large(self, engine: JaxEngine) -> str:
        """The reason where the model does not fit several times, as ranks of a host have it."""
        numel = sum(int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(self._given.params or ()))
        stats, on_host = engine.accelerator.memory_stats(), engine.accelerator.works_on_host_memory
        needed = numel * _BYTES_OF_PARAMETER * (engine.communicator.world_size if on_host else 1)
        if needed <= (stats.free_nbytes or stats.total_nbytes or 1 << 32) // 2:
            return ""
        return f"the whole model of {numel:,} parameters does not fit one rank several times"

    def _say(self, engine: JaxEngine, reason: str) -> None:
        if engine.communicator.rank == 0:
            names = ", ".join(self._names)
            log.info("not proven: %s: %s; run `polyaccel verify` on the script", names or "the engine", reason)

    def _at_first_batch(self, data: Any, is_whole: bool) -> None:
        engine = self._engine()
        assert engine is not None  # it calls
        began_s = perf_counter()
        try:
            self._digest = digest = self._digest_of(engine, data, is_whole=is_whole)
            is_known = self._choice == "auto" and engine.communicator.rank == 0 and bool(digest) and is_proven(digest)
            if engine.communicator.all_gather_object(is_known)[0]:
                return
            with _quiet():
                proof = self._prove(engine, data, is_whole=is_whole)
        except CommError:
            raise
        except NotProvenError as error:
            self._say(engine, error.message)
        except Exception as error:  # training does not depend on it
            log.debug("a proof failed", exc_info=True)
            self._say(engine, f"the proof failed: {type(error).__name__}: {error}"[:240])
        else:
            self._conclude(engine, proof, perf_counter() - began_s)
        finally:
            self._given.release()

    def _conclude(self, engine: JaxEngine, proof: Proof, seconds: float) -> None:
        """Log what was shown. Raises VerificationError where a rewrite is to blame."""
        weak = any(engine.communicator.all_gather_object(proof.is_weak))
        idle = [name for name in self._names if not proof.acted.get(name)]
        if weak:
            self._say(engine, "the function gives other numbers in each run")
        elif proof.findings and (proof.blamed or self._given.partition is not None):
            raise _error_of(proof)
        elif proof.findings:
            self._say(engine, f"no single rewrite changes {proof.findings[0]}")
        elif idle:
            self._say(engine, f"{', '.join(idle)} changed nothing")
        elif engine.communicator.rank == 0:
            summary = f"{proof.quantities} quantities of {STEPS} steps equal plain JAX in float32"
            log.info("proven: %s: %s (%.1f s)", ", ".join(self._names) or "the engine", summary, seconds)
            if self._digest:
                keep_proven(self._digest, summary)

    def _prove(self, engine: JaxEngine, data: Any, *, is_whole: bool) -> Proof:
        shared: dict[bool, PlainPrograms] = {}

        def run(variant: Variant) -> list[Record]:
            return self._run(engine, variant, data, shared, is_whole=is_whole)

        def merge(findings: Sequence[Finding]) -> list[Finding]:
            own = [
                [finding.key, finding.found, finding.wanted, finding.spreads] for finding in findings[:_MOST_FINDINGS]
            ]
            gathered = engine.communicator.all_gather_object(own)
            by_key = {key: Finding(key, *rest) for found in gathered for key, *rest in found}
            return in_order(by_key.values(), names)

        names = list(named_leaves(self._given.params)[0]) if self._given.params is not None else []
        states = random.getstate(), np.random.get_state()
        try:
            return prove(run, variant=Variant("", steps=STEPS, bins=_BINS), all_findings=merge)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

    def _run(
        self, engine: JaxEngine, variant: Variant, data: Any, shared: dict[bool, PlainPrograms], *, is_whole: bool
    ) -> list[Record]:
        """This rank's record of a run. Raises NotProvenError on all ranks where one failed."""
        active, failure, made = ActiveRun(variant), "", None
        try:
            given = self._context(engine, variant)
            made = PlainJaxEngine(active, given, shared) if variant.is_plain else self._compose(given)
            if isinstance(made, JaxEngine):
                record_engine(active, made)
            for _ in range(STEPS):
                _train(made, data, is_whole=is_whole)
        except VerificationEnd:
            pass
        except (CommError, NotProvenError):
            raise
        except Exception as error:
            failure = f"the run {variant.name!r} failed: {type(error).__name__}: {str(error)[:200]}"
        finally:
            if isinstance(made, JaxEngine):
                _destroy(made)
        if failures := [one for one in engine.communicator.all_gather_object(failure) if one]:
            raise NotProvenError(failures[0])
        record = active.record_of(engine.communicator.rank)
        self._exchange(engine, record)
        return [record]

    def _context(self, engine: JaxEngine, variant: Variant) -> RewriteContext:
        config = float32_config(self._config)
        if not has_plain_update(engine):
            adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
            config = config.model_copy(update={"optimizer": Config.model_validate({"optimizer": adamw}).optimizer})
        config = config_without(config, engine.config, self._given.own_devices, variant.without)
        is_native = config.jax.execution == "native"
        world_size, devices = (engine.mesh.size_of(("data",)), self._given.own_devices) if is_native else (None, 1)
        runtime = engine.runtime.with_config(config, world_size=world_size)
        given = replace(self._given, runtime=runtime, applied=[], own_devices=devices)
        switch_off(given, variant.without)
        return given

    def _exchange(self, engine: JaxEngine, record: Record) -> None:
        """Average the losses of all ranks, and let each have the rewrites of all."""
        losses = {key: float(value) for key, value in record.values.items() if key.split("/", 2)[1] == "loss"}
        gathered = engine.communicator.all_gather_object([losses, record.acted])
        for key in losses:
            record.values[key] = np.asarray(np.mean([one[key] for one, _ in gathered if key in one]))
        for name, count in [pair for _, acted in gathered for pair in acted.items()]:
            record.acted[name] = max(record.acted.get(name, 0), count)
        record.acted = dict(sorted(record.acted.items()))

    def _digest_of(self, engine: JaxEngine, data: Any, *, is_whole: bool) -> str:
        """A digest of the function and the update as JAX traces them, the config, ranks and versions."""
        shapes = jax.tree.map(lambda leaf: (jnp.shape(leaf), str(jnp.result_type(leaf))), as_inputs(data))
        lines = [f"{package} {version(package)}" for package in ("polyaccel", "jax", "numpy")]
        lines += [str(shapes), self._config.model_dump_json(), str(engine.communicator.world_size), str(self._names)]
        optimizer = engine.zero.optimizer
        lines.append("" if optimizer is None else optimizer.kind)
        lines.append("" if engine._carried is None else str(engine._carried.is_averaged))
        first = data if is_whole else data[0]
        try:
            lines.append(str(engine._traced(as_inputs(first))))
            if self._given.client is not None:
                lines.append(str(_traced_update(self._given.client, engine)))
        except Exception:  # it will be raised where the function runs
            return ""
        digest = hashlib.sha256()
        for line in lines:
            digest.update(re.sub(r"0x[0-9a-f]+", "", line).encode())
            digest.update(b"\0")
        return digest.hexdigest()


def _train(engine: JaxEngine | PlainJaxEngine, data: Any, *, is_whole: bool) -> None:
    """Do an optimizer step."""
    if is_whole:
        engine.train_batch(data)
    else:
        engine.train_batch(islice(cycle(data), engine.gradient_accumulation_steps()))


def _destroy(engine: JaxEngine) -> None:
    """Release an engine whose groups belong to another, and those that are its own."""
    engine.destroy()
    stage = getattr(engine, "_stage_runtime", engine.runtime)
    if stage is not engine.runtime:
        for group in stage._groups.values():
            group.close()


def _traced_update(client: Any, engine: JaxEngine) -> Any:
    """The update of a transformation as JAX traces it."""
    shapes = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in engine.adapter.leaves()]
    tree = jax.tree.unflatten(engine.adapter.structure, shapes)
    return jax.make_jaxpr(lambda params: client.update(params, client.init(params), params))(tree)


def _error_of(proof: Proof) -> VerificationError:
    blamed = proof.blamed or (_ON_MESH,)  # nothing trains a function on its mesh without native mode
    first, names = proof.findings[0], " and ".join(blamed)
    cures = "; ".join(_CURES[name] for name in blamed if name in _CURES)
    return VerificationError(
        f"{names} computes other numbers than plain JAX: {first.kind} {first.name} of step {first.step} is "
        f"{first.found:.6g}, not {first.wanted:.6g}",
        hint=f'{cures}; compare with `polyaccel verify`; "verify": "off" trains all the same',
        value=first.name,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what engines of a proof log below a warning to themselves, where no other rank is a thread."""
    logger = getLogger("polyaccel")
    level = logger.level
    if threading.current_thread() is threading.main_thread():
        logger.setLevel(max(WARNING, level))
    try:
        yield
    finally:
        logger.setLevel(level)
