"""Right programs under the proof at the first step: none may be an alarm, and most are to be proven.

    polyaccel run --nproc 2 tests/zoo/first_steps.py --only llama

prints a row for each model, mesh and precision, and the counts. Ranks are processes there, and threads in the tests.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
import warnings
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "support"))  # where no pytest has done so
from planted_change import plant
from proof_verdicts import pass_on_verdicts
from zoo_models import TEXTS, Entry, NotBuilt, build, entries, loss_of

import polyaccel
from polyaccel.comm.default import default_communicator
from polyaccel.errors import PolyaccelError, VerificationError
from polyaccel.torch.data import cast_floats
from polyaccel.torch.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from polyaccel.torch.rewrites.cuts import ExpertParallel, TensorParallel
from polyaccel.torch.rewrites.engine import ActivationCheckpointing
from polyaccel.torch.rewrites.forwards import SequenceParallel, TiledCompute
from polyaccel.torch.rewrites.stages import PipelineBlocks, PipelineLayers
from polyaccel.torch.verify.first_step import FirstStepProof
from polyaccel.verify.prove import Proof

_LOCK = threading.Lock()
TENSOR, RECOMPUTED = {"tensor_parallel": {"autotp_size": 2}}, {"activation_checkpointing": {"enabled": True}}
STAGE_3 = {"zero_optimization": {"stage": 3}}
MESHES: dict[str, dict[str, Any]] = {
    "tensor 2": {**TENSOR, "zero_optimization": {"stage": 1}},
    "Ulysses 2, stage 3": {"sequence_parallel_size": 2, **STAGE_3},
    "ring 2": {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ring"}},
    "pipeline 2": {"pipeline": {"stages": 2}},
    "expert 2": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "tiles": {"tiled_compute": {"enabled": True}},
    "recomputation": RECOMPUTED,
    "recomputation, stage 3 on the host": {
        **RECOMPUTED,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
    },
}
REWRITES: dict[str, type[Any]] = {
    "tensor": TensorParallel,
    "Ulysses": SequenceParallel,
    "ring": SequenceParallel,
    "pipeline": PipelineBlocks,
    "expert": ExpertParallel,
    "tiles": TiledCompute,
    "recomputation": ActivationCheckpointing,
}
"""The rewrite of each mesh."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}
MODELS = (
    *("causal/llama", "causal/qwen3", "causal/mixtral", "causal/gpt2", "causal/gemma2", "causal/apertus"),
    *("causal/mamba", "causal/phi3", "causal/opt", "causal/gpt_neox", "causal/mistral", "causal/olmo2"),
    *("causal/qwen2_moe", "causal/falcon", "masked/bert", "masked/roberta", "masked/distilbert"),
    *("sequence-to-sequence/t5", "vision/vit", "vision/convnext", "speech/whisper"),
)


class Plain(nn.Module):
    """A model of plain torch: blocks in a list, dropout, buffers, frozen and tied parameters."""

    def __init__(self, *, batch_norm: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        words = torch.arange(16).view(2, 8)
        self.dummy_inputs = {"input_ids": words, "labels": words}
        self.words = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block(batch_norm=batch_norm) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64, bias=False)
        if tied:
            self.head.weight = self.words.weight
        if frozen:
            self.words.weight.requires_grad_(False)
            self.layers[0].requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        """The loss, or outputs."""
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Block(nn.Module):
    """A feed-forward layer with a buffer."""

    mean: Tensor

    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.fc1, self.act, self.fc2 = nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mean", torch.full((16,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """The layer with its residual."""
        y = self.norm(x.flatten(0, 1)).view_as(x) - self.mean.to(x.dtype)
        return x + self.drop(self.fc2(self.act(self.fc1(y))))


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "plain, dropout": Plain,
    "plain, batch norm": lambda: Plain(batch_norm=True),
    "plain, tied": lambda: Plain(tied=True),
    "plain, frozen": lambda: Plain(frozen=True),
}


def layers(*, tied: bool = False, **settings: Any) -> Callable[[], nn.Module]:
    """A maker of layers of two stages, which the script builds itself."""

    def make() -> nn.Module:
        words = TiedLayerSpec("words", nn.Embedding, 64, 16) if tied else LayerSpec(nn.Embedding, 64, 16)
        head = (
            TiedLayerSpec("words", nn.Embedding, 64, 16, forward_fn=lambda module, x: x @ module.weight.t())
            if tied
            else LayerSpec(nn.Linear, 16, 64, bias=False)
        )
        blocks = [LayerSpec(Block, batch_norm=False) for _ in range(4)]
        return PipelineModule(
            [words, *blocks, LayerSpec(nn.LayerNorm, 16), head], 2, loss_fn=_loss_of_words, **settings
        )

    return make


def _loss_of_words(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layers": layers(),
    "layers, tied": layers(tied=True),
    "layers, chunks": layers(schedule="interleaved", chunks=2),
    "layers, recomputed": layers(activation_checkpoint_interval=2, partition_method="uniform"),
}


@dataclass(frozen=True)
class Case:
    """A model under a mesh in a precision."""

    model: str
    mesh: str
    precision: str

    def __str__(self) -> str:
        return f"{self.model}, {self.mesh}, {self.precision}"


@dataclass
class Verdict:
    """What the proof of a case came to: `proven`, `not proven`, `alarm`, or `refused` by the engine."""

    result: str
    reason: str = ""
    seconds: float = 0.0


def cases(only: str = "") -> Iterator[Case]:
    """Yield the cases. Precisions alternate for models of transformers."""
    for name in PLAIN:
        for mesh in ("tensor 2", "pipeline 2", "recomputation", "recomputation, stage 3 on the host"):
            for precision in PRECISIONS:
                yield from _chosen(Case(name, mesh, precision), only)
    for name in LAYERS:
        for precision in PRECISIONS:
            yield from _chosen(Case(name, "pipeline 2", precision), only)
    number = 0
    for name in MODELS:
        for mesh in MESHES:
            is_mixture = name in ("causal/mixtral", "causal/qwen2_moe")
            if (mesh.startswith(("Ulysses", "ring")) and not name.startswith(TEXTS)) or (
                mesh == "expert 2" and not is_mixture
            ):
                continue
            yield from _chosen(Case(name, mesh, tuple(PRECISIONS)[number % 3]), only)
            number += 1


def _chosen(case: Case, only: str) -> Iterator[Case]:
    if only in str(case):
        yield case


@cache
def _tiny(name: str) -> Any:
    kind, type_ = name.split("/")
    return build(next(one for one in entries() if isinstance(one, Entry) and (one.kind, one.type) == (kind, type_)))


_found: dict[int, list[Proof | str]] = {}
"""What proofs of a thread came to."""


@contextmanager
def watching() -> Iterator[None]:
    """Keep what proofs come to, for `run`."""
    with pytest.MonkeyPatch.context() as patches:
        pass_on_verdicts(patches, FirstStepProof, lambda one: _found.setdefault(threading.get_ident(), []).append(one))
        yield


@contextmanager
def planted(case: Case) -> Iterator[None]:
    """Let the case's rewrite double the gradient of the last parameter of the model, wherever it is applied."""
    rewrite = PipelineLayers if case.model in LAYERS else REWRITES[case.mesh.split(",")[0].split(" ")[0]]

    def double(model: nn.Module) -> None:
        trained = [one for one in model.parameters() if one.requires_grad]
        trained[-1].register_hook(lambda one: 2 * one)

    with pytest.MonkeyPatch.context() as patches:
        plant(patches, rewrite, double)
        yield


def run(case: Case) -> Verdict:
    """Train one step of a case on this rank within `watching`, and return what its proof came to. Collective."""
    found = _found[threading.get_ident()] = []
    with _LOCK:
        if case.model in PLAIN or case.model in LAYERS:
            torch.manual_seed(0)
            model = (PLAIN | LAYERS)[case.model]()
            draw = torch.Generator().manual_seed(1)
            words = [torch.randint(0, 64, (4, length), generator=draw) for length in (12, 8)]
            batches = [{"input_ids": one, "labels": one.clone()} for one in words]
        else:
            tiny = _tiny(case.model)
            model, batches = copy.deepcopy(tiny.model), copy.deepcopy(tiny.batches[0])
    config = {
        "verify": "always",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        **copy.deepcopy(MESHES[case.mesh]),
        **PRECISIONS[case.precision],
    }
    engine, began_s = None, time.perf_counter()
    try:
        engine, *_ = polyaccel.initialize(model=model, config=config)
        dtype = next(one.dtype for one in engine.module.parameters() if one.is_floating_point())
        batches = [cast_floats(batch, dtype) for batch in batches]
        if "pipeline" in config:
            engine.train_batch(iter([tuple(one.values()) for one in batches] if case.model in LAYERS else batches))
        else:
            for batch in batches:
                engine.backward(_loss(engine(**batch)))
                engine.step()
    except VerificationError as error:
        return Verdict("alarm", error.message)
    except PolyaccelError as error:
        return Verdict("refused", error.message)
    finally:
        if engine is not None:
            engine.destroy()
    seconds = time.perf_counter() - began_s
    if reasons := [one for one in found if isinstance(one, str)]:
        return Verdict("not proven", reasons[0], seconds)
    return Verdict("proven" if found else "not compared", "", seconds)


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else loss_of(output)


def main() -> int:
    """Print the rows and counts. Returns 1 where a right program is an alarm, or a wrong one is proven."""
    parser = ArgumentParser(description="Prove first steps of right programs.")
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--planted", type=int, default=0, metavar="N", help="plant an error in every Nth case")
    arguments = parser.parse_args()
    every: int = arguments.planted
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    polyaccel.init_distributed()
    rank, counts = default_communicator().rank, Counter[str]()
    reasons = Counter[str]()
    for case in list(cases(arguments.only))[:: every or 1]:
        try:
            with watching(), planted(case) if every else nullcontext():
                verdict = run(case)
        except NotBuilt as error:
            verdict = Verdict("not built", str(error))
        except Exception as error:  # of a model or an engine: the row has it
            verdict = Verdict("failed", f"{type(error).__name__}: {error}")
        counts[verdict.result] += 1
        reasons[verdict.reason.split(":")[0][:60]] += verdict.result == "not proven"
        if rank == 0:
            reason = " ".join(verdict.reason.split())[:150]
            print(f"{case!s:60} {verdict.result:10} {verdict.seconds:5.1f} s  {reason}", flush=True)
    if rank == 0:
        print(dict(counts))
        print({reason: count for reason, count in reasons.items() if count})
    return int(bool(counts["proven"] if every else counts["alarm"]))


if __name__ == "__main__":
    sys.exit(main())
