"""Random numbers inside of cut regions: other ones on every rank, while everywhere else all ranks draw the same.

[Note: Derived dropout state]
From the output of a column layer to the input of the row layer behind it each rank has other features, and dropout
there must differ. For that long the default generator of the device gets a state that follows from the one it had and
from the rank; then it gets back what it had, moved on if the region drew. There is no second state to keep: setting the
default generator (a checkpoint, the recomputation of activations) sets the region's numbers too, and where a region
draws nothing, all others are those of one rank.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.host_values import host_values
from polyaccel.torch.tensor_parallel.ranks import TensorRanks


class Regions:
    """Enters and leaves the cut regions of one model. See [Note: Derived dropout state]."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._device: torch.device | None = None
        self._outside: Tensor | None = None
        self._begun: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Regions:
        return Regions(self._ranks)

    @outside_graphs
    @host_values()
    def enter(self, tensor: Tensor) -> None:
        """From here on tensors on the device of `tensor` are this rank's own. Nothing happens inside of a region."""
        if self._device is not None or self._ranks.size == 1:
            return
        self._device = tensor.device
        random = _random_of(tensor.device)
        self._outside = random.get_rng_state()
        digest = blake2b(self._outside.numpy().tobytes(), digest_size=8, person=b"rank %d" % self._ranks.rank).digest()
        # torch.manual_seed sets the generators of all devices too, and formats three tracebacks for absent ones.
        seeded = torch.default_generator if tensor.device.type == "cpu" else random
        seeded.manual_seed(int.from_bytes(digest, "little") >> 1)
        self._begun = random.get_rng_state()

    @outside_graphs
    @host_values()
    def leave(self) -> None:
        """What follows is the same on all ranks. Nothing happens outside of regions."""
        device, self._device = self._device, None
        if device is None:
            return
        assert self._begun is not None
        assert self._outside is not None
        random = _random_of(device)
        has_drawn = not torch.equal(random.get_rng_state(), self._begun)
        random.set_rng_state(self._outside)
        if has_drawn:
            torch.rand((), device=device)
        self._outside = self._begun = None


@outside_graphs
@host_values()
def sync_rng(ranks: TensorRanks) -> None:
    """Copy the first rank's generator states, so that replicated values are drawn equally. Collective."""
    for device in sorted({torch_device_of(ranks.communicator.accelerator), torch.device("cpu")}, key=str):
        random = _random_of(device)
        states = ranks.communicator.all_gather_object(random.get_rng_state().numpy().tobytes())
        if states[0] != states[ranks.rank]:
            random.set_rng_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))


def _random_of(device: torch.device) -> Any:
    """Return the module of `device`'s generator functions."""
    return torch if device.type == "cpu" else torch.get_device_module(device)
