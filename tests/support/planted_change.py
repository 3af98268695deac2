"""A wrong rewrite for tests of proofs: a change of the model after each application of a right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, rewrite: type[Any], change: Callable[[Any], None]) -> None:
    """Let `change` be made to the model after each application of `rewrite`."""
    apply = rewrite.apply

    def apply_wrongly(self: Any, context: Any) -> Any:
        done = apply(self, context)
        change(context.model)
        return done

    monkeypatch.setattr(rewrite, "apply", apply_wrongly)
