"""Random numbers by name: several streams of one device's generators, each drawn from where a part of a program says.

Ranks that share a model draw alike where they hold the same, and apart where each holds a part of it:

    states = named_random_states()
    states.add("sharded", seed + 1 + tensor_rank)
    with states.use("sharded"):
        hidden = dropout(hidden)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import get_accelerator
from polyaccel.errors import PolyaccelError


class RngTracker:
    """States of the generators of `accelerator` (None: the chosen one) by name. Recomputed activations draw from them
    as they did the first time."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator
        self._states: dict[str, bytes] = {}
        self._seeds: dict[int, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def add(self, name: str, seed: int) -> None:
        """A state of its own, as if the generators had just been seeded with `seed`.

        Raises PolyaccelError for a name that exists, and for a seed that another name has: they would draw alike.
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
        """Draw from the state `name` inside; outside, the generators go on as if nothing had been drawn. Raises
        PolyaccelError for a name that does not exist."""
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
        """All states as they are now, for `restore`."""
        return dict(self._states)

    def restore(self, states: Mapping[str, bytes]) -> None:
        """Go on from `states`, which `states()` has given."""
        self._states = dict(states)

    def clear(self) -> None:
        """Forget all names."""
        self._states.clear()
        self._seeds.clear()

    @property
    def _device(self) -> Accelerator:
        return self._accelerator or get_accelerator()


_NAMED = RngTracker()


def named_random_states() -> RngTracker:
    """The named random states of this process."""
    return _NAMED
