"""Random numbers inside of cut regions: other ones on every rank, while everywhere else all ranks draw alike.

[Note: Derived, not kept]
From the output of a column layer to the input of the row layer behind it each rank has features of its own, and dropout
there must differ. For that long the default generator of the device gets a state that follows from the one it had and
from the rank; then it gets back what it had, moved on if the region drew. There is no second state to keep: whoever
sets the default generator (a checkpoint, the recomputation of activations) has set the region's numbers too, and where
a region draws nothing, all others are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from polyaccel.torch.parallel.ranks import TensorRanks


class Regions:
    """Enters and leaves the cut regions of one model. See [Note: Derived, not kept]."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._generator: torch.Generator | None = None
        self._outside: Tensor | None = None
        self._begun: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Regions:
        return Regions(self._ranks)

    def enter(self, tensor: Tensor) -> None:
        """From here on tensors on the device of `tensor` are this rank's own. Nothing happens inside of a region."""
        if self._generator is not None or self._ranks.size == 1:
            return
        generator = default_generator(tensor.device)
        self._outside = generator.get_state()
        digest = blake2b(self._outside.numpy().tobytes(), digest_size=8, person=b"rank %d" % self._ranks.rank).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        self._begun = generator.get_state()
        self._generator = generator

    def leave(self) -> None:
        """What follows is alike on all ranks. Nothing happens outside of regions."""
        generator, self._generator = self._generator, None
        if generator is None:
            return
        assert self._begun is not None
        assert self._outside is not None
        has_drawn = not torch.equal(generator.get_state(), self._begun)
        generator.set_state(self._outside)
        if has_drawn:
            torch.rand((), device=generator.device, generator=generator)
        self._outside = self._begun = None


def draw_alike(ranks: TensorRanks, devices: Iterable[torch.device]) -> None:
    """Give the default generators of `devices` the state that the first rank's have, as what is whole on every rank has
    to be drawn alike. Collective."""
    for device in sorted(set(devices) | {torch.device("cpu")}, key=str):
        if device.type != "meta":
            generator = default_generator(device)
            states = ranks.communicator.all_gather_object(generator.get_state().numpy().tobytes())
            if states[0] != states[ranks.rank]:
                generator.set_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch's functions use on `device`."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]
