"""What is altered in a config that was written for DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """A key that was dropped or altered; `what` ends the sentence. `is_warning` where a reader may not expect it."""

    key: str
    what: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"config: {self.key} {self.what}"
