"""The generators of torch, Python and numpy, which a proof uses and gives back as they were."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch


def has_own_generators() -> bool:
    """Whether this rank is a process; ranks that are threads share the generators."""
    return threading.current_thread() is threading.main_thread()


def states_of(device: torch.device) -> tuple[Any, ...]:
    """The states of all generators, that of `device` too."""
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), own, random.getstate(), np.random.get_state()


def restore(states: tuple[Any, ...], device: torch.device) -> None:
    """Give the generators the states that `states_of` returned."""
    host, own, python, numpy = states
    torch.set_rng_state(host)
    if own is not None:
        torch.get_device_module(device).set_rng_state(own, device)
    random.setstate(python)
    np.random.set_state(numpy)
