"""Which autocast a forward pass runs under: the config's, else the one that the caller is in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from logging import getLogger
from typing import Any

import torch

log = getLogger(__name__)


class ForwardAutocast:
    """The autocast of an engine's forward passes on a device: of type `dtype` where the config sets one, else what is
    in force around the call. Where the two differ, it warns once."""

    keeps_outer = True
    """Whether an autocast around the call stays in force where the config has none; False turns it off."""

    def __init__(self, device_type: str, dtype: torch.dtype | None) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._has_warned = False

    def __call__(self) -> AbstractContextManager[Any]:
        """The context of one forward pass."""
        kind, dtype = self._device_type, self._dtype
        outer = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if outer is not None and outer != dtype:
            self._warn(outer)
        if dtype is not None:
            return torch.autocast(kind, dtype=dtype)
        if outer is None:
            return nullcontext()
        if not self.keeps_outer:
            return torch.autocast(kind, enabled=False)
        torch.clear_autocast_cache()  # of weights before an update inside of the same region
        return nullcontext()

    def _warn(self, outer: torch.dtype) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        name = str(outer).removeprefix("torch.")
        hint = f'"torch_autocast": {{"enabled": true, "dtype": "{name}"}} in the config has it from the engine'
        if self._dtype is not None:
            hint = f"the config sets {self._dtype}"
        keeps = self._dtype is None and self.keeps_outer
        log.warning("torch.autocast(%s) around forward %s: %s", name, "stays in force" if keeps else "is off", hint)
