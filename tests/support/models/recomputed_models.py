"""A model whose blocks are recomputed, and what of its activations is there at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    with torch.random.fork_rng():
        torch.manual_seed(0)
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
