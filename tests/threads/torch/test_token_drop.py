"""Random layerwise token dropping, against a loop over samples in plain torch."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, tiny
from parity_models import make_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyaccel
from polyaccel.comm.init.threads import run_threads
from polyaccel.config import load_config
from polyaccel.engine.policies.data_sampling import token_drop_policy_of
from polyaccel.errors import ConfigError, PolyaccelError

LAYERS, LENGTH, ROWS = 4, 12, 3
SEED = 1234


def section(**changes: Any) -> dict[str, Any]:
    ltd = {
        "enabled": True,
        "total_layer_num": LAYERS,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 4,
            "max_value": LENGTH,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 4, "seq_per_step": 2},
        },
    }
    return {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd | changes}}


def config_for(stage: int, **changes: Any) -> Any:
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = make_config(stage, zero=zero, data_efficiency=section(**changes))
    config["optimizer"]["params"] |= {"eps": 1e-5, "weight_decay": 0.01}
    return config | {"train_micro_batch_size_per_gpu": ROWS}


def drawn(micro: int, place: int, layer: int, tokens: int) -> Tensor:
    """The note's draw: a number of each micro-batch, place and layer."""
    seed = 0
    for part in (SEED, micro, place, layer):
        seed = seed * 1_000_003 + part
    numbers = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed % 2**63))
    return torch.stack([row.argsort()[:tokens].sort().values for row in numbers])


def ids(micro: int, place: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * micro + place))


def plain_loss(model: Any, micro: int, place: int, tokens: int) -> Tensor:
    """Each sample alone: a layer computes its tokens at their positions, and the others pass by."""
    base, total = model.model, []
    for row, own in enumerate(ids(micro, place)):
        hidden, positions = base.embed_tokens(own[None]), torch.arange(LENGTH)[None]
        for number, layer in enumerate(base.layers):
            kept = drawn(micro, place, number, tokens)[row] if number in (1, 2) and tokens < LENGTH else positions[0]
            part = hidden[:, kept]
            rotary = base.rotary_emb(part, positions[:, kept])
            changed = layer(part, position_embeddings=rotary, position_ids=positions[:, kept])
            hidden = hidden.clone()
            hidden[:, kept] = changed
        logits = model.lm_head(base.norm(hidden))[0, :-1].float()
        total.append(nn.functional.cross_entropy(logits, own[1:]))
    return torch.stack(total).mean()


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 2)])
@pytest.mark.parametrize("recomputes", [False, True])
def test_training_is_that_of_a_loop_over_samples(stage: int, world: int, recomputes: bool, tmp_path: Any) -> None:
    start = tiny("llama", dtype=torch.float32, num_hidden_layers=LAYERS).train()
    plain: Any = deepcopy(start)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-5)
    wanted = []
    for step, tokens in enumerate((4, 6, 8, 10, 12)):  # 4 + 8 t / 4
        losses = [plain_loss(plain, step, place, tokens) for place in range(world)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        wanted.append([one.item() for one in losses])
    models = [deepcopy(start) for _ in range(world)]
    config = config_for(stage)
    if recomputes:
        config["activation_checkpointing"] = {"number_checkpoints": 2}

    def train(engine: Any, place: int, steps: range) -> list[float]:
        found = []
        for step in steps:
            own = ids(step, place)
            loss = engine(own, labels=own, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    def run(communicator: Any) -> list[float]:
        model, place = models[communicator.rank], communicator.rank
        engine = polyaccel.initialize(model=model, config=config)[0]
        found = train(engine, place, range(2))
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        engine = polyaccel.initialize(model=model, config=config)[0]
        engine.load_checkpoint(str(tmp_path))
        found += train(engine, place, range(2, 5))
        engine.eval()
        whole = engine(ids(0, 0), use_cache=False).logits
        engine.destroy()
        assert torch.equal(model.eval()(ids(0, 0), use_cache=False).logits, whole)
        return found

    found = run_threads(world, run)
    assert [list(one) for one in zip(*found, strict=True)] == [pytest.approx(one, rel=2e-5) for one in wanted]


def test_tensor_ranks_drop_the_same_tokens() -> None:
    start = tiny("llama", dtype=torch.float32, num_hidden_layers=LAYERS).train()
    wanted = plain_loss(deepcopy(start), 0, 0, 4).item()
    models = [deepcopy(start) for _ in range(2)]
    config = config_for(2) | {"mesh": {"tensor": 2}}

    def run(communicator: Any) -> float:
        engine = polyaccel.initialize(model=models[communicator.rank], config=config)[0]
        loss: float = engine(ids(0, 0), labels=ids(0, 0), use_cache=False).loss.item()
        engine.destroy()
        return loss

    assert run_threads(2, run) == pytest.approx([wanted] * 2, rel=1e-5)


class Block(nn.Module):
    """Attention of one head under a mask, (length, batch, width) or (batch, length, width)."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.mix, self._first = nn.Linear(8, 24), first

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        whole = hidden if self._first else hidden.transpose(0, 1)
        query, key, value = self.mix(whole)[:, None].chunk(3, -1)
        found = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask)[:, 0]
        return hidden + (found if self._first else found.transpose(0, 1)), None


class Stack(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(Block(first) for _ in range(LAYERS))

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = hidden if self.first else hidden.transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)[0]
        return (hidden if self.first else hidden.transpose(0, 1)).square().mean()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("heads", [0, 1])
def test_masks_are_cut_to_the_tokens_that_are_left(first: bool, heads: int) -> None:
    torch.manual_seed(0)
    model, hidden = Stack(first), torch.randn(ROWS, LENGTH, 8)
    mask = (torch.rand(ROWS, 1, LENGTH, LENGTH) > 0.3) | torch.eye(LENGTH, dtype=torch.bool) if heads else None
    plain, total = deepcopy(model), []
    for row in range(ROWS):
        states = hidden[row : row + 1]
        for number, layer in enumerate(plain.layers):
            kept = drawn(0, 0, number, 4)[row] if number in (1, 2) else torch.arange(LENGTH)
            own = None if mask is None else mask[row : row + 1][:, :, kept][:, :, :, kept]
            part = states[:, kept] if first else states[:, kept].transpose(0, 1)
            changed = layer(part, own)[0]
            states = states.clone()
            states[:, kept] = changed if first else changed.transpose(0, 1)
        total.append(states.square().mean())
    order = "batch_seq_dim" if first else "seq_batch_dim"
    engine = polyaccel.initialize(model=model, config=config_for(0, hidden_state_order=order))[0]
    loss = engine(hidden, mask)
    assert loss.item() == pytest.approx(torch.stack(total).mean().item(), rel=1e-5)
    engine.backward(loss)
    engine.destroy()


class Others(nn.Module):
    """A layer that keeps what it was given, and adds its first input's double to it."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.scale, self.config = nn.Parameter(torch.tensor(2.0)), config
        self.given: dict[str, Any] = {}

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        **named: Any,
    ) -> Tensor:
        self.given = {"mask": attention_mask, "encoder": encoder_hidden_states, **named}
        return hidden * (1 + self.scale)


class Calls(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Others(config) for _ in range(LAYERS))

    def forward(self, hidden: Tensor, *given: Any, **named: Any) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, *given, **named)
        return hidden


def test_positional_inputs_are_known_by_their_names() -> None:
    model = Calls()
    engine = polyaccel.initialize(model=model, config=config_for(0))[0]
    pairs = torch.arange(LENGTH * LENGTH).view(1, 1, LENGTH, LENGTH)
    others = torch.randn(ROWS, LENGTH, 8)  # as many tokens as the decoder's, and still others
    across = torch.arange(LENGTH)[None, None, :, None].expand(ROWS, 1, LENGTH, 5)
    engine(torch.randn(ROWS, LENGTH, 8), pairs, others, encoder_attention_mask=across)
    for number in (1, 2):
        layer: Any = model.layers[number]
        given, kept = layer.given, drawn(0, 0, number, 4)
        assert torch.equal(given["mask"][:, 0], torch.stack([pairs[0, 0][row][:, row] for row in kept]))
        assert given["encoder"] is others
        assert torch.equal(given["encoder_attention_mask"][:, 0, :, 0], kept)
    engine.destroy()


REFUSED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "mask of another kind": (None, (object(),), {}),
    "cache by place": (None, (None, None, object()), {}),
    "bias that a layer would cut": (None, (), {"position_bias": torch.zeros(7, 1, 64)}),
    "mask of pairs by another name": (None, (), {"own_mask": torch.ones(1, LENGTH, LENGTH)}),
    "gaps that mean documents": (
        SimpleNamespace(_attn_implementation="flash_attention_2"),
        (),
        {"position_ids": torch.arange(LENGTH)[None]},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_would_be_cut_wrongly_are_refused(name: str) -> None:
    config, given, named = REFUSED[name]
    engine = polyaccel.initialize(model=Calls(config), config=config_for(0))[0]
    with pytest.raises(PolyaccelError):
        engine(torch.randn(1, LENGTH, 8), *given, **named)
    with torch.no_grad():
        engine.eval()
        engine(torch.randn(1, LENGTH, 8), *given, **named)
    engine.destroy()


def test_reentrant_regions_see_the_same_tokens_twice() -> None:
    """Their first pass has no gradients; it must drop what the second one drops."""
    torch.manual_seed(0)
    start, hidden = Stack(True), torch.randn(ROWS, LENGTH, 8)
    found = []
    for reentrant in (None, True):
        model = deepcopy(start)
        engine = polyaccel.initialize(model=model, config=config_for(0))[0]
        if reentrant:
            calls = [partial(checkpoint, layer, use_reentrant=True) for layer in model.layers]
            states = hidden.clone().requires_grad_()
            for call in calls:
                states = call(states, None)[0]
            loss = states.square().mean()
        else:
            loss = engine(hidden, None)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.item(), [one.grad for one in model.parameters()]))
        engine.destroy()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "change",
    [
        {"total_layer_num": None},
        {"random_ltd_layer_num": 3},
        {"random_ltd_layer_id": [1, 4]},
        {"random_ltd_layer_id": []},
        {"random_ltd_schedule": {"min_value": 4, "max_value": 2, "schedule_config": {"require_steps": 1}}},
        {"layer_token_lr_schedule": {"enabled": True}},
    ],
)
def test_sections_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        token_drop_policy_of(load_config({"data_efficiency": section(**change)}))


def test_models_and_inputs_that_do_not_fit_are_refused() -> None:
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=LAYERS).train()
    with pytest.raises(ConfigError):
        polyaccel.initialize(model=deepcopy(model), config=config_for(0, total_layer_num=5))
    engine = polyaccel.initialize(model=model, config=config_for(0))[0]
    with pytest.raises(PolyaccelError) as caught:
        engine(ids(0, 0), labels=ids(0, 0), use_cache=True)
    assert caught.value.value in ("past_key_values", "cache")  # the second since transformers 5.24
    engine.destroy()
    sequence = config_for(0) | {"sequence_parallel_size": 2}

    def run(communicator: Any) -> None:
        with pytest.raises(ConfigError):
            polyaccel.initialize(model=deepcopy(model), config=sequence)

    run_threads(2, run)
