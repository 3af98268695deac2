"""Blocks that are recomputed by one key of the config: the bits of none, at every stage and in every way; and within a
limit of memory, which is measured."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from pairwise import combinations
from parity_models import drawn_from, make_config, on_threads
from stage3_models import seeded
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polyaccel
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import ConfigError
from polyaccel.planner.recomputation import Level
from polyaccel.torch.activation_checkpointing.blocks import RecomputedBlocks
from polyaccel.torch.activation_checkpointing.inputs import KeptInputs
from polyaccel.torch.sharding.units import find_blocks

os.environ["HF_HUB_OFFLINE"] = "1"

VOCAB, WIDTH = 19, 12


class MixingBlock(nn.Module):
    """Attention, a wide part and dropout, with a mask by name."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.wide = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, hidden: Tensor, *, places: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (self.mix(self.norm(hidden)) * places[0] + places[1]).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        hidden = hidden + self.drop(attended)
        return hidden + self.drop(self.narrow(torch.tanh(self.wide(hidden))))


class BlockModel(nn.Module):
    """Blocks around each of which the root's parameters stand: tied ones, a frozen one; one block runs twice."""

    def __init__(self, blocks: int = 4, width: int = WIDTH, vocab: int = VOCAB, drop: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(MixingBlock(width, drop) for _ in range(blocks))
        self.blocks[1].narrow.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.full((3 * width,), 0.9))
        self.shift = nn.Parameter(torch.zeros(3 * width), requires_grad=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):  # the first one twice
            hidden = block(hidden, places=(self.scale, self.shift))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def block_model(**sizes: Any) -> BlockModel:
    """The same model every time."""
    with drawn_from(0):
        return BlockModel(**sizes)


def tokens(step: int, micro: int, rank: int, shape: tuple[int, int] = (2, 6), vocab: int = VOCAB) -> Tensor:
    """The tokens of one micro-batch, a function of where it stands."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, vocab, shape, generator=generator)


class LiveMemory(TorchDispatchMode):
    """The memory of all results of operations inside that is still there, without the parameters of `module`: looked
    at after each operation."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._own = {StorageWeakRef(parameter.untyped_storage()) for parameter in module.parameters()}
        self._seen: dict[StorageWeakRef, int] = {}
        self.peak_nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if (memory := StorageWeakRef(storage)) not in self._own:
                    self._seen[memory] = storage.nbytes()
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return out

    @property
    def nbytes(self) -> int:
        """The bytes that are there now."""
        self._seen = {memory: nbytes for memory, nbytes in self._seen.items() if not memory.expired()}
        return sum(self._seen.values())


WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"enabled": True},
    "reentrant": {"enabled": True, "use_reentrant": True},
    "kept products": {"enabled": True, "keep": ["matmul", "attention"]},
    "limited": {"memory_limit": 27_000},
    "in one piece": {"enabled": True, "contiguous_memory_optimization": True, "number_checkpoints": 5},
}
SMALL = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20}


def train(world: int, stage: int, way: dict[str, Any], build: Any = block_model, **changes: Any) -> list[Any]:
    """Losses, norms and master weights of two steps of two micro-batches, on every rank."""
    config = make_config(stage, accumulation=2, zero=SMALL, activation_checkpointing=way, **changes)

    def work(communicator: Any, model: nn.Module) -> Any:
        engine, *_ = polyaccel.initialize(model=model, config=copy.deepcopy(config))
        figures: list[float] = []
        for step in range(2):
            for micro in range(2):
                torch.manual_seed(10 * step + micro)
                loss = engine(tokens(step, micro, communicator.rank))
                engine.backward(loss) if step else loss.backward()
                engine.step()
                figures.append(loss.item())
            figures.append(engine.get_global_grad_norm())
        return figures, [place.master.raw.tolist() for place in engine.zero.params if place.master is not None]

    return on_threads(world, work, build)


PLAIN: dict[Any, list[Any]] = {}


def plain(world: int, stage: int, build: Any = block_model, **changes: Any) -> list[Any]:
    key = (world, stage, build, str(changes))
    if key not in PLAIN:
        PLAIN[key] = train(world, stage, {}, build, **changes)
    return PLAIN[key]


@combinations(stage=(0, 1, 2, 3), way=tuple(WAYS), precision=("fp32", "bf16", "torch_autocast"))
def test_recomputing_changes_no_bit(stage, way, precision):
    """One rank, with dropout: ranks that are threads share one stream of random numbers."""
    changes = {} if precision == "fp32" else {precision: {"enabled": True}}
    assert train(1, stage, WAYS[way], **changes) == plain(1, stage, **changes)


def test_ranks_along_the_tensor_axis_keep_a_part_of_each_input(monkeypatch):
    """They compute with the same micro-batch here, so what each of them has is what a plain run of one has."""
    numels, keep = [], KeptInputs._keep

    def noted(self: Any, tensor: Tensor) -> Any:
        kept = keep(self, tensor)
        numels.append((kept.memory.numel(), tensor.numel()))
        return kept

    along = EngineBuilder.process_group_for
    monkeypatch.setattr(KeptInputs, "_keep", noted)
    # No part of this model is cut, so the ranks stand for such ones.
    monkeypatch.setattr(
        EngineBuilder,
        "process_group_for",
        lambda self, axes: self.communicator if "tensor" in axes else along(self, axes),
    )
    way = {"enabled": True, "partition_activations": True}
    config = make_config(2, zero=SMALL, activation_checkpointing=way)

    def work(communicator: Any, model: nn.Module) -> list[float]:
        engine, *_ = polyaccel.initialize(model=model, config=copy.deepcopy(config))
        losses = []
        for step in range(2):
            losses.append(engine(tokens(step, 0, 0)).item())
            engine.backward(engine(tokens(step, 0, 0)))
            engine.step()
        return losses

    halves = on_threads(2, work, still_model)
    assert {2 * part for part, _ in numels} == {whole for _, whole in numels}
    config = make_config(2, zero=SMALL)
    assert halves == on_threads(1, work, still_model) * 2


def still_model() -> BlockModel:
    return block_model(drop=0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [2, 3])
def test_on_two_ranks_too(stage, way):
    assert train(2, stage, WAYS[way], still_model) == plain(2, stage, still_model)


# Hugging Face's models, as they are.


def hugging_face(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
        return transformers.LlamaForCausalLM(config)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCAB, n_positions=8, n_embd=8, n_layer=3, n_head=2)
        )
    if name == "mixtral":
        config = transformers.MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, num_local_experts=3, **sizes)
        return transformers.MixtralForCausalLM(config)
    config = transformers.T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


class Labelled(nn.Module):
    """The loss of a language model, from tokens alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = hugging_face(name)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


BUILDS = {name: seeded(lambda name=name: Labelled(name).train()) for name in ("llama", "gpt2", "mixtral", "t5")}


@pytest.mark.parametrize("way", ["recomputed", "reentrant", "kept products"])
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_models_of_hugging_face_train_to_the_same_bits(name, stage, way):
    """With dropout where they have it, and with their caches, which a second run must not fill again."""
    build = BUILDS[name]
    found, wanted = train(1, stage, WAYS[way], build), plain(1, stage, build)
    if (name, way) == ("t5", "reentrant"):  # adds up in another order what several blocks give back to the encoder
        (found,), (wanted,) = found, wanted
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    else:
        assert found == wanted


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_sharded_models_of_hugging_face_train_on_two_ranks(name):
    def build():
        model = BUILDS[name]()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if hasattr(part, "dropout") and isinstance(part.dropout, float):
                part.dropout = 0.0
        return model

    assert train(2, 3, WAYS["recomputed"], build) == train(2, 3, {}, build)


def test_both_halves_of_an_encoder_and_decoder_are_recomputed():
    blocks = find_blocks(BUILDS["t5"]())
    assert [name.rpartition("model.")[2] for name in blocks] == [
        f"{half}.block.{index}" for half in ("encoder", "decoder") for index in range(2)
    ]


def test_adapters_on_frozen_layers_get_their_gradients():
    """No input of the first block requires a gradient, which torch's reentrant way would answer with none."""

    def build():
        model = block_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("wide" in name)
        return model

    wanted = plain(1, 3, build)
    assert train(1, 3, WAYS["reentrant"], build) == wanted
    assert train(1, 3, WAYS["recomputed"], build) == wanted
    assert wanted[0][0][2] > 0


# What is recomputed.


RUNS: Counter[int] = Counter()
"""Outside of the blocks, whose own attributes are as if they had run once."""


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        RUNS[id(self)] = 0

    @property
    def runs(self) -> int:
        return RUNS[id(self)]

    def forward(self, hidden: Tensor) -> Tensor:
        RUNS[id(self)] += 1
        return torch.sin(self.inner(torch.cos(hidden)))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Counted() for _ in range(3))
        self.other = nn.ModuleList(nn.Sequential(Counted(), nn.Tanh()) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        for block in (*self.blocks, *self.other):
            hidden = block(hidden)
        return hidden.sum()

    @property
    def runs(self) -> list[int]:
        return [part.runs for part in self.modules() if isinstance(part, Counted)]


def runs_of(way: dict[str, Any], *, grad: bool = True) -> list[int]:
    model = Chain()
    engine, *_ = polyaccel.initialize(model=model, config=make_config(0, activation_checkpointing=way))
    with torch.set_grad_enabled(grad):
        loss = engine(torch.ones(2, 4))
    if grad:
        engine.backward(loss)
    engine.destroy()
    return model.runs


def test_every_list_of_blocks_is_recomputed_once():
    assert runs_of({}) == [1] * 5
    assert runs_of({"enabled": True}) == [2] * 5
    assert runs_of({"enabled": True}, grad=False) == [1] * 5


@pytest.mark.parametrize(
    ("names", "runs"),
    [(["blocks.1"], [1, 2, 1, 1, 1]), (["other.*"], [1, 1, 1, 2, 2]), (["Counted"], [2] * 5)],
    ids=["name", "pattern", "class"],
)
def test_modules_are_named_by_class_and_by_place(names, runs):
    assert runs_of({"enabled": True, "blocks": names}) == runs


@pytest.mark.parametrize(
    ("way", "key"),
    [
        ({"enabled": True, "blocks": ["Nothing"]}, "activation_checkpointing.blocks"),
        ({"enabled": True, "keep": ["aten.nothing_of_torch"]}, "activation_checkpointing.keep"),
        ({"keep": ["matmul"]}, "activation_checkpointing.keep"),
        ({"use_reentrant": True}, "activation_checkpointing.use_reentrant"),
        ({"enabled": True, "keep": ["matmul"], "use_reentrant": True}, "activation_checkpointing.use_reentrant"),
        ({"contiguous_memory_optimization": True}, "activation_checkpointing.number_checkpoints"),
        ({"memory_limit": "much"}, "activation_checkpointing.memory_limit"),
    ],
    ids=["blocks", "keep", "keep of none", "reentrant of none", "reentrant and keep", "no number", "no size"],
)
def test_what_cannot_be_done_is_refused_by_its_key(way, key):
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=Chain(), config=make_config(0, activation_checkpointing=way))
    assert [problem.key for problem in caught.value.problems] == [key]


def test_a_model_without_blocks_is_told_so():
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(
            model=nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
            config=make_config(0, activation_checkpointing={"enabled": True}),
        )
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("activation_checkpointing.blocks", [])
    ]


@pytest.mark.parametrize("build", [block_model, BUILDS["gpt2"]], ids=["plain", "gpt2"])
def test_copies_and_pickles_are_ordinary_models_and_so_is_what_is_given_back(build):
    model, reference = build(), build()
    before = {name: dict(part.__dict__).keys() for name, part in model.named_modules()}
    engine, *_ = polyaccel.initialize(model=model, config=make_config(0, activation_checkpointing={"enabled": True}))
    copied, unpickled = copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))
    engine.destroy()
    assert {name: dict(part.__dict__).keys() for name, part in model.named_modules()} == before
    for one in (copied, unpickled, model):
        one.eval(), reference.eval()
        loss, wanted = one(tokens(0, 0, 0)), reference(tokens(0, 0, 0))
        loss.backward(), wanted.backward()
        assert torch.equal(loss, wanted)
        gradients = [parameter.grad for parameter in one.parameters() if parameter.requires_grad]
        expected = [parameter.grad for parameter in reference.parameters() if parameter.requires_grad]
        assert all(map(torch.equal, gradients, expected))
        reference.zero_grad()


def test_hooks_on_a_block_run_once():
    model, seen = Chain(), []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("hook"))
    engine, *_ = polyaccel.initialize(model=model, config=make_config(3, activation_checkpointing={"enabled": True}))
    engine.backward(engine(torch.ones(2, 4)))
    assert model.blocks[0].runs == 2
    assert seen == ["hook"]


# A limit of memory.


def limited_engine(limit: int | None, keep: tuple[str, ...] = (), **sizes: Any) -> Any:
    way: dict[str, Any] = {"memory_limit": limit} if limit is not None else {"enabled": True, "keep": list(keep)}
    model = block_model(blocks=6, width=64, vocab=64, drop=0.1, **sizes)
    config = make_config(0, activation_checkpointing=way, matrix_kernels="off")
    return polyaccel.initialize(model=model, config=config)[0]


def measured(engine: Any, batch: Tensor) -> tuple[int, int]:
    """Bytes at the end of the forward pass, and the most of forward and backward."""
    gc.collect()
    with LiveMemory(engine.module) as live:
        loss = engine(batch)
        kept = live.nbytes
        engine.backward(loss)
    return kept, live.peak_nbytes


def test_the_limit_is_kept_and_more_memory_means_less_work():
    """By the memory of every tensor that is alive, whoever holds it."""
    batch = tokens(0, 0, 0, (16, 64), vocab=64)
    probe = limited_engine(1 << 40)
    probe(batch)
    costs = probe.recomputation.blocks.costs
    least, most = (costs.peak_nbytes(costs.all_at(level)) for level in (Level.NOTHING, Level.EVERYTHING))
    assert least < 0.5 * most
    work, kepts = [], []
    for share in (0.0, 0.2, 0.4, 0.7, 1.0):
        limit = int(least + share * (most - least))
        engine = limited_engine(limit)
        engine.backward(engine(batch))  # the trial
        engine.zero_grad()
        levels = engine.recomputation.blocks.levels
        kept, peak = measured(engine, batch)
        assert kept <= limit + 4  # the loss itself
        assert kept == pytest.approx(costs.kept_nbytes(levels), rel=0.1)
        # Beside activations: gradients of activations, and results on their way.
        assert peak <= 1.1 * limit + 8 * batch.numel() * 64 * 4
        work.append(costs.cost(levels))
        kepts.append(kept)
    assert work == sorted(work, reverse=True)
    assert work[-1] == 0
    assert len(set(work)) == 5
    assert kepts == sorted(kepts)


def test_the_trial_itself_keeps_the_limit():
    batch = tokens(0, 0, 0, (16, 64), vocab=64)
    engine = limited_engine(1 << 40)
    kept, _ = measured(engine, batch)
    costs = engine.recomputation.blocks.costs
    assert kept <= 1.1 * costs.kept_nbytes(costs.all_at(Level.NOTHING))


def test_a_larger_batch_is_another_trial_and_a_smaller_one_is_not(monkeypatch):
    limits, choose = [], RecomputedBlocks._choose

    def noted(self: Any, shapes: Any, costs: Any) -> None:
        limits.append(tuple(tuple(shape) for shape in shapes))
        choose(self, shapes, costs)

    monkeypatch.setattr(RecomputedBlocks, "_choose", noted)
    engine = limited_engine(4_000_000)
    for shape in ((4, 16), (4, 8), (2, 16), (2, 24), (2, 24), (4, 16)):
        engine.backward(engine(tokens(0, 0, 0, shape, vocab=64)))
    assert limits == [((4, 16),), ((2, 24),)]


def test_a_limit_that_cannot_be_kept_is_refused_with_what_is_needed():
    engine = limited_engine(1000)
    with pytest.raises(ConfigError) as caught:
        engine(tokens(0, 0, 0, (4, 16), vocab=64))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("activation_checkpointing.memory_limit", 1000)
    ]


def test_kept_operations_take_less_than_all_and_more_than_none():
    batch = tokens(0, 0, 0, (16, 64), vocab=64)
    kept = [measured(limited_engine(None, keep), batch)[0] for keep in ((), ("attention",), ("matmul", "attention"))]
    engine = limited_engine(1 << 40)
    engine.backward(engine(batch))
    everything, _ = measured(engine, batch)
    assert kept[0] < kept[1] < kept[2] < everything
