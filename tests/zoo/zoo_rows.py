"""Rows of the zoo: two steps of a tiny model under each mesh, compared with plain torch in one process."""

from __future__ import annotations

import copy
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from zoo_models import TEXTS, Tiny, loss_of

import polyaccel
from polyaccel.comm.default import default_communicator
from polyaccel.errors import CommError, InvariantError, PolyaccelError
from polyaccel.torch.experts.models import has_experts
from polyaccel.verify.compare import Finding, Tolerances, merge
from polyaccel.verify.prove import NOISES, threads_run
from polyaccel.verify.variant import Array, Variant

CLOSE = 1e-5
"""Differences up to this share of a tensor's largest value are equal, where plain runs agree better than that."""
STEPS = 2
_BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "gradient_clipping": 1.0,
}
_HINTS = (
    ("tiled_compute", "mlp", False),
    ("tiled_compute", "loss", False),
    ("sequence_parallel", "method", "tokenwise"),
)
"""What refusals propose, by section and key of the config: such a row is trained once more."""
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Mesh:
    """A config over a number of ranks."""

    ranks: int
    config: Mapping[str, Any]
    rewrite: str
    """The rewrite that has to act for the row to prove anything."""
    data_ranks: int = 1
    only_texts: bool = False
    only_mixtures: bool = False


def _stage(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


MESHES = {
    "tensor 2": Mesh(2, {"tensor_parallel": {"autotp_size": 2}, **_stage(1)}, "tensor_parallel"),
    "tensor 3, stage 3": Mesh(3, {"tensor_parallel": {"autotp_size": 3}, **_stage(3)}, "tensor_parallel"),
    "Ulysses 2, stage 3": Mesh(2, {"sequence_parallel_size": 2, **_stage(3)}, "sequence_parallel", only_texts=True),
    "ring 2": Mesh(
        2,
        {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ring"}},
        "sequence_parallel",
        only_texts=True,
    ),
    "pipeline 2": Mesh(2, {"pipeline": {"stages": 2}, **_stage(1)}, "pipeline"),
    "expert 2": Mesh(
        2, {"expert_parallel": {"enabled": True, "autoep_size": 2}}, "expert_parallel", 2, only_mixtures=True
    ),
    "tiles": Mesh(1, {"tiled_compute": {"enabled": True}}, "tiled_compute"),
    "recomputation": Mesh(1, {"activation_checkpointing": {"enabled": True}}, "activation_checkpointing"),
    "stage 3": Mesh(2, _stage(3), "zero_optimization", 2),
}


@dataclass
class Row:
    """How one model trains under one mesh."""

    mesh: str
    result: str
    """`equal`, `refused`, `defect`, `no loss` (the mesh needs one) or `not built`."""
    detail: str = ""
    worst: float = 0.0
    """The largest difference in spreads of plain runs."""
    acted: int = 0
    """Modules and parameters that the rewrite changed."""
    hint: str = ""
    """What the config has in addition, as a refusal proposed."""


class Comparison:
    """The plain runs of a tiny model, and rows that are compared with them."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        with patch.object(nn.utils, "get_total_norm", _exact_norm):
            runs = [self._values(1, {}, 1, Variant(f"plain{at:+d}", True, at, steps=STEPS))[0] for at in (0, -1, 1)]
        self._tolerances = Tolerances.of_runs(runs[0], runs[1:])
        self._has_experts = has_experts(tiny.model)

    def meshes(self) -> Iterator[str]:
        """Yield the meshes that apply to the model."""
        for name, mesh in MESHES.items():
            if (mesh.only_texts and self.tiny.entry.kind not in TEXTS) or (
                mesh.only_mixtures and not self._has_experts
            ):
                continue
            yield name

    def row(self, name: str) -> Row:
        """Train under a mesh."""
        mesh = MESHES[name]
        if not self.tiny.has_loss and ("pipeline" in mesh.config or mesh.only_texts):
            return Row(name, "no loss", "the model has no loss of its own")
        row = self._trained(name, mesh, mesh.config)
        for section, key, value in _HINTS:
            if row.result != "refused" or key not in row.detail or section not in str(mesh.config):
                continue
            config = {**mesh.config, section: {**mesh.config.get(section, {}), key: value}}
            other = self._trained(name, mesh, config)
            if other.result != "refused":
                other.detail = f"{other.detail} (with {section}.{key} {value})".strip()
                other.hint = f"{section}.{key} {value}"
                return other
        return row

    def _trained(self, name: str, mesh: Mesh, config: Mapping[str, Any]) -> Row:
        try:
            values, acted = self._values(mesh.ranks, config, mesh.data_ranks, Variant("engine", steps=STEPS))
        except (CommError, InvariantError) as error:
            return Row(name, "defect", f"{type(error).__name__}: {error}")
        except PolyaccelError as error:
            return Row(name, "refused", f"{type(error).__name__}: {error}")
        except Exception as error:  # a raw error is a defect
            return Row(name, "defect", f"raw {type(error).__name__}: {error} | {_place(error)}")
        return self._compared(name, mesh, values, acted.get(mesh.rewrite, 0))

    def _compared(self, name: str, mesh: Mesh, values: dict[str, Array], acted: int) -> Row:
        if mesh.data_ranks > 1:  # statistics of a batch are those of a rank's own samples
            values = {key: value for key, value in values.items() if key.split("/")[1] not in ("buffer", "attribute")}
        tolerances = self._tolerances
        note = "" if acted else "the rewrite did not act"
        missing = [key for key in tolerances.plain if key.split("/")[1] in ("gradient", "update") and key not in values]
        names = [key.split("/", 2)[2] for key in tolerances.plain if key.startswith("0/gradient/")]
        found = _findings(tolerances, values, names)
        for noise in range(1, NOISES + 1):
            if missing or not found:
                break
            with_noise = self._values(1, {}, 1, Variant("noise", True, noise=noise, steps=STEPS))[0]
            if not _findings(around := tolerances.around(with_noise), values, names):
                found, tolerances, note = [], around, "as plain torch with noise on its weights"
        worst = tolerances.worst(values)
        if missing:
            return Row(name, "defect", f"not recorded: {missing[0]} and {len(missing) - 1} others", worst, acted)
        if found:
            return Row(name, "defect", f"{found[0]} ({len(found)} differ)", worst, acted)
        return Row(name, "equal", note, worst, acted)

    def _values(
        self, ranks: int, config: Mapping[str, Any], data_ranks: int, variant: Variant
    ) -> tuple[dict[str, Array], dict[str, int]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records = threads_run(ranks, self._program(config, data_ranks))(variant)
        assert len(records) == ranks
        acted: dict[str, int] = {}
        for record in records:
            acted |= {name: max(count, acted.get(name, 0)) for name, count in record.acted.items()}
        values = {key: value for key, value in merge(records).items() if key.split("/")[1] != "input"}
        return values, acted  # gradients of inputs are of one process's mean, or of each rank's own

    def _program(self, config: Mapping[str, Any], data_ranks: int) -> Callable[[], None]:
        settings = {**_BASE, **config, "gradient_accumulation_steps": 2 // data_ranks}

        def train() -> None:
            with _LOCK:
                model = copy.deepcopy(self.tiny.model)
            engine, *_ = polyaccel.initialize(model=model, config=copy.deepcopy(settings))
            for both in self.tiny.batches:
                mine = both if data_ranks == 1 else [both[default_communicator().rank]]
                if "pipeline" in config:
                    engine.train_batch(iter(mine))
                    continue
                for batch in mine:
                    engine.backward(loss_of(engine(**batch)))
                    engine.step()
            raise AssertionError("the program ran on after its last step")

        return train


def _findings(tolerances: Tolerances, values: dict[str, Array], names: list[str]) -> list[Finding]:
    """What differs by more than `CLOSE`."""
    return [
        one for one in tolerances.findings(values, names) if not _is_close(tolerances.plain[one.key], values[one.key])
    ]


def _is_close(plain: Array, found: Array) -> bool:
    if plain.shape != found.shape or plain.dtype.kind != "f":
        return False
    difference = float(np.max(np.abs(plain.astype(np.float64) - found), initial=0.0))
    return difference <= CLOSE * float(np.max(np.abs(plain), initial=0.0))


def _exact_norm(gradients: list[Tensor]) -> Tensor:
    """The norm that gradients are clipped by. Torch's sum of a million squares in float32 is off by 3e-5."""
    return torch.stack([one.double().square().sum() for one in gradients]).sum().sqrt().float()


def _place(error: BaseException) -> str:
    """The innermost lines of ours and of all in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "/polyaccel/" in one.filename and "/comm/" not in one.filename]
    chosen = [*ours[-1:], *frames[-1:]]
    return " <- ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in reversed(chosen))
