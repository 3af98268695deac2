"""Layers that treat each token by itself, each rank of a sequence with some of the tokens.

[Note: Tokenwise ranks]
All ranks of a sequence are called with the same batch, and compute whatever mixes tokens whole, each for itself. Around
a feed-forward layer each rank takes its part of the tokens, and afterwards gathers the results of all. So it does not
matter how a model mixes tokens or where it has its positions from.

The engine takes the mean of the ranks' gradients, and every gradient here is such that this mean is right, while those
of the ranks differ: what leaves a layer backward is of a rank's tokens alone, and zero elsewhere, and what enters one
is added up over the ranks. Ranks have to draw the same random numbers where they compute the same: in training a
forward pass draws those of the first rank, and a layer on a rank's tokens draws its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.torch.sharding.units import find_blocks
from polyaccel.torch.tensor_parallel.functions import gathered_shared
from polyaccel.torch.tensor_parallel.ranks import TensorRanks, even_parts
from polyaccel.torch.tiled.models import TiledForward, find_chunks, find_mlps, is_linear


class TokenwiseLayers:
    """`model`, whose feed-forward layers compute a part of the tokens on each rank of `communicator` until `remove`.
    Raises PolyaccelError for a model without such layers. See [Note: Tokenwise ranks]."""

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._model, self._ranks = model, TensorRanks(communicator)
        self._stack: ExitStack | None = None
        self.has_labels = False
        layers = _layers_of(model)
        if not layers:
            kind = type(model).__name__
            raise PolyaccelError(
                f"the sequences of a {kind} cannot be cut over ranks: no linear layer is found in its blocks",
                hint="set sequence_parallel_size to 1",
                value=kind,
            )
        self.module_names = tuple(layers)
        """Full names of the modules that compute a part of the tokens on each rank."""
        self._cut = [_OwnTokens(layer, self, method) for layer, method in layers.values()]
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    @property
    def ranks(self) -> TensorRanks:
        """The ranks that share the tokens."""
        return self._ranks

    def remove(self) -> None:
        """Let the model run whole again."""
        for handle in self._handles:
            handle.remove()
        for each in self._cut:
            each.release()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if module is not self._model:  # a copy of the model, which took the hooks along
            return
        self._restore()
        self.has_labels = named.get("labels") is not None
        tensors = [one for one in (*args, *named.values()) if isinstance(one, Tensor)]
        if self._ranks.size > 1 and module.training and not any(isinstance(one, FakeTensor) for one in tensors):
            device = next((one.device for one in module.parameters()), torch.device("cpu"))
            seed = torch.randint(1 << 60, (1,)).to(device)
            self._ranks.broadcast(seed)
            self._stack = ExitStack()
            self._stack.enter_context(_drawing(int(seed), device))

    def _end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if module is self._model:
            self._restore()

    def _restore(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()


class _OwnTokens(TiledForward):
    """`forward` of a layer, or another `method` of a block, of this rank's tokens, with the results of all."""

    def __init__(self, layer: nn.Module, shared: TokenwiseLayers, method: str) -> None:
        super().__init__(layer, None, method)
        self._shared = shared

    def __call__(self, *args: Any, **named: Any) -> Any:
        given = (*args, *named.values())
        x, ranks = given[0] if len(given) == 1 else None, self._shared.ranks
        is_cut = ranks.size > 1 and (self.layer.training or self._shared.has_labels)
        if not is_cut or not isinstance(x, Tensor) or x.dim() < 2 or torch._C._are_functorch_transforms_active():
            return self.before(*args, **named)
        rows = x.reshape(1, -1, x.shape[-1])
        if rows.shape[1] < ranks.size:
            return self.before(*args, **named)
        sizes = even_parts(rows.shape[1], ranks.size)
        out = self._computed(rows.narrow(1, ranks.first(sizes), sizes[ranks.rank]), self.before)
        whole = gathered_shared(out, ranks, 1, sizes)
        return whole.view(*x.shape[:-1], whole.shape[-1])

    def _computed(self, own: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.layer.training or isinstance(own, FakeTensor):
            return function(own)
        seed = int(torch.randint(1 << 60, (1,)))  # the same on all ranks, which continue after it
        with _drawing((seed + self._shared.ranks.rank) % (1 << 60), own.device):
            return function(own)


@contextmanager
def _drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers of `seed`, and restore the generators at the end."""
    is_host = device.type == "cpu"
    with torch.random.fork_rng([] if is_host else [device], device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if not is_host:
            getattr(torch, device.type).manual_seed(seed)
        yield


def _layers_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The feed-forward layers in the blocks of `model`, by full name with the method that computes them. Where those
    are not modules of one argument, the linear layers of the blocks, without those of attention if others are left."""
    mlps = find_mlps(model, one_way=True)  # ranks on different ways would unshard different parameters
    found = {name: (module, "forward") for name, module in mlps.items()} | find_chunks(model, one_way=True)
    if found:
        return found
    linears: dict[str, tuple[nn.Module, str]] = {}
    of_attention: dict[str, tuple[nn.Module, str]] = {}
    for block_name, block in (find_blocks(model) or {"": model}).items():
        for name, module in block.named_modules(prefix=block_name):
            if is_linear(module):
                inside = name.removeprefix(block_name).lower()
                (of_attention if "attn" in inside or "attention" in inside else linears)[name] = module, "forward"
    return linears or of_attention
