"""The states of every generator that a training script draws from, on one rank: of Python, numpy, torch and the
accelerator."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyaccel.accelerators.base import Accelerator
from polyaccel.errors import CheckpointError, ShardingError


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of a rank's generators, each as its own library takes it back.

    `device` is the name of the accelerator whose generators' states `accelerator` has, "" where the checkpoint does not
    have it. Another one keeps its own: then `accelerator` is None.
    """

    device: str
    accelerator: bytes | None
    torch: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def now(cls, accelerator: Accelerator) -> RandomStates:
        """The present states."""
        numpy_state = np.random.get_state(legacy=True)
        assert isinstance(numpy_state, tuple)  # because of legacy=True
        state = accelerator.rng_state()
        return cls(accelerator.name, state, torch.get_rng_state(), random.getstate(), numpy_state)

    @classmethod
    def from_blobs(cls, blobs: Mapping[str, bytes], accelerator: Accelerator) -> RandomStates:
        """Decode `to_blobs` for `accelerator` without changing its generators."""
        try:
            version, internal, gauss = json.loads(blobs["rng.python"])
            kind, keys, position, has_gauss, cached = json.loads(blobs["rng.numpy"])
            device = blobs.get("rng.device", b"").decode()
            states = cls(
                device,
                _state_for(accelerator, blobs["rng.accelerator"], device),
                torch.frombuffer(bytearray(blobs["rng.torch"]), dtype=torch.uint8),
                (version, tuple(internal), gauss),
                (kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached),
            )
            torch.Generator().set_state(states.torch)
            random.Random().setstate(states.python)
            np.random.RandomState().set_state(states.numpy)
        except (KeyError, ValueError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"the saved states of the random generators cannot be taken over: {type(error).__name__}: {error}",
                hint="load another tag, or the weights alone with load_module_only=True",
            ) from error
        return states

    def to_blobs(self) -> dict[str, bytes]:
        """As bytes of a checkpoint."""
        kind, keys, position, has_gauss, cached = self.numpy
        return {
            "rng.device": self.device.encode(),
            "rng.accelerator": self.accelerator or b"",
            "rng.torch": self.torch.numpy().tobytes(),
            "rng.python": json.dumps(self.python).encode(),
            "rng.numpy": json.dumps([kind, np.asarray(keys).tolist(), position, has_gauss, cached]).encode(),
        }

    def restore(self, accelerator: Accelerator) -> None:
        """Let every generator continue from here."""
        if self.accelerator is not None:
            accelerator.set_rng_state(self.accelerator)
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def _state_for(accelerator: Accelerator, state: bytes, device: str) -> bytes | None:
    """Return the saved `state` of `device` if `accelerator` can continue from it, else None."""
    if device not in ("", accelerator.name):
        return None
    present = accelerator.rng_state()
    try:
        accelerator.set_rng_state(state)
    except ShardingError:
        if device:
            raise
        return None
    finally:
        accelerator.set_rng_state(present)
    return state
