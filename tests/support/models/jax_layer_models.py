"""Models with layers of the other framework in them, and their twins of torch alone with the same weights and names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from parity_models import VOCAB
from stage3_models import WIDTH, Block, Case, Gpt, seeded, token_loss
from torch import Tensor, nn

from polyaccel.jax import as_torch, unit
from polyaccel.torch import as_jax


def mlp(params: Any, hidden: jax.Array) -> jax.Array:
    wide, narrow = params["wide"], params["narrow"]
    return jnp.tanh(hidden @ wide["weight"].T + wide["bias"]) @ narrow["weight"].T + narrow["bias"]


def scaled(params: Any, hidden: jax.Array) -> jax.Array:
    return hidden * params["scale"]


def arrays(module: nn.Module) -> dict[str, jax.Array]:
    return {name: jnp.array(value.detach().numpy()) for name, value in module.named_parameters()}


class TorchMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.narrow = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.narrow(torch.tanh(self.wide(hidden)))
        return out


class TorchScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class TorchBlock(Block):
    """Attention, then a multilayer perceptron in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.wide, self.narrow
        self.mlp: nn.Module = TorchMlp()

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        out: Tensor = hidden + self.mlp(hidden)
        return out


class MixedBlock(TorchBlock):
    """Its multilayer perceptron is a function of JAX."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = as_torch(mlp, {name: arrays(part) for name, part in self.mlp.named_children()})


class TorchGpt(Gpt):
    """A scale before the head, which belongs to no block."""

    block: type[nn.Module] = TorchBlock

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__(recompute, self.block)
        self.last: nn.Module = TorchScale()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position.weight[: tokens.shape[-1]] + self.shift
        for block in self.blocks:
            hidden = self.run_block(block, hidden)
        logits = self.head(self.last(hidden) * self.scale)
        return nn.functional.cross_entropy(logits.float().reshape(-1, VOCAB), targets.flatten())


class MixedGpt(TorchGpt):
    block = MixedBlock

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__(recompute)
        self.last = as_torch(scaled, arrays(self.last))


class TorchOutside(nn.Module):
    """Predicts the next byte from the last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.inner = TorchMlp()

    @staticmethod
    def build() -> TorchOutside:
        return seeded(TorchOutside)()  # type: ignore[return-value]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        logits = (hidden + self.inner(hidden)) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class JaxOutside:
    """`TorchOutside` as a function of JAX, but for its multilayer perceptron, which is torch's still."""

    def __init__(self) -> None:
        model = TorchOutside.build()
        self._inner = as_jax(model.inner)
        self.params = {"embed": arrays(model.embed), "inner": self._inner.params}

    def __call__(self, params: Any, batch: Any, rng: Any) -> jax.Array:
        tokens, targets = batch
        table = params["embed"]["weight"]
        hidden = table[tokens]
        logits = (hidden + unit(self._inner)(params["inner"], hidden)) @ table.T
        right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - right).mean()


TORCH = Case(seeded(TorchGpt), token_loss)
MIXED = {how: Case(seeded(lambda how=how: MixedGpt(how)), token_loss) for how in (None, "reentrant", "non-reentrant")}
