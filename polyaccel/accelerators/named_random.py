"""Random numbers by name: several states of one device's generators, and which part of a program draws from which.

`named_random_states` returns this process's `RngTracker` (Megatron's CudaRNGStatesTracker). Imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import get_accelerator
from polyaccel.errors import PolyaccelError


class RngTracker:
    """Named states of the generators of one accelerator, as Megatron's CudaRNGStatesTracker has them.

    Ranks that share a model draw the same numbers where they hold the same values, and different ones where each holds
    a part. Recomputed activations draw the same numbers again.

    Args:
        accelerator: Accelerator whose generators draw. None takes the one of `get_accelerator` at each use.

    Example:
        ```python
        states = polyaccel.utils.named_random_states()
        states.add("sharded", seed + 1 + tensor_rank)
        with states.use("sharded"):
            hidden = dropout(hidden)
        ```
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator
        self._states: dict[str, bytes] = {}
        self._seeds: dict[int, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def add(self, name: str, seed: int) -> None:
        """Add a named state, as if the generators had just been seeded with `seed`. The present state stays as it is.

        Args:
            name: Name of the new state.
            seed: Seed of the new state.

        Raises:
            PolyaccelError: The name exists, or another name has the same seed and would draw the same numbers.
        """
        if name in self._states:
            raise PolyaccelError(f"there are random states named {name!r} already", hint="clear() first", value=name)
        if seed in self._seeds:
            raise PolyaccelError(
                f"{name!r} has the seed of {self._seeds[seed]!r}, so both would draw the same numbers",
                hint="use another seed",
                value=seed,
            )
        device = self._device
        before = device.rng_state()
        try:
            device.manual_seed(seed)
            self._states[name] = device.rng_state()
        finally:
            device.set_rng_state(before)
        self._seeds[seed] = name

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Draw from the state `name` inside the block. Afterwards the generators continue as if nothing had been drawn.

        Args:
            name: Name that `add` has added.

        Yields:
            Nothing.

        Raises:
            PolyaccelError: The name does not exist.
        """
        if name not in self._states:
            raise PolyaccelError(
                f"there are no random states named {name!r}",
                hint=f"add({name!r}, seed) first; there are: {', '.join(self._states) or 'none'}",
                value=name,
            )
        device = self._device
        before = device.rng_state()
        device.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = device.rng_state()
            device.set_rng_state(before)

    def states(self) -> dict[str, bytes]:
        """Return a copy of all states as they are now, for `restore`."""
        return dict(self._states)

    def restore(self, states: Mapping[str, bytes]) -> None:
        """Continue from earlier states.

        Args:
            states: Result of `states`, by name.
        """
        self._states = dict(states)

    def clear(self) -> None:
        """Remove all names."""
        self._states.clear()
        self._seeds.clear()

    @property
    def _device(self) -> Accelerator:
        return self._accelerator or get_accelerator()


_NAMED = RngTracker()


def named_random_states() -> RngTracker:
    """Return the named random states of this process."""
    return _NAMED
