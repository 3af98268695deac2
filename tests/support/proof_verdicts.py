"""What proofs at the first step come to, for tests of both frameworks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyaccel.verify.prove import Proof


def prove_as_users_do(patches: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the config decide what is proven, with an empty cache in `folder`."""
    patches.delenv("POLYACCEL_VERIFY", raising=False)
    patches.setenv("XDG_CACHE_HOME", str(folder))


def pass_on_verdicts(patches: pytest.MonkeyPatch, kind: type[Any], keep: Callable[[Proof | str], object]) -> None:
    """Call `keep` with each proof of the class `kind`, and with each reason for what was not proven."""
    say, conclude = kind._say, kind._conclude

    def note_reason(self: Any, engine: Any, reason: str) -> None:
        keep(reason)
        say(self, engine, reason)

    def note_proof(self: Any, engine: Any, proof: Proof, seconds: float) -> None:
        keep(proof)
        conclude(self, engine, proof, seconds)

    patches.setattr(kind, "_say", note_reason)
    patches.setattr(kind, "_conclude", note_proof)
