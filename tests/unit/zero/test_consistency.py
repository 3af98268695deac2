"""What failed in the middle is refused until everything was loaded."""

from __future__ import annotations

import pytest

from polyaccel.errors import PolyaccelError
from polyaccel.zero.update.consistency import Consistency


def test_a_change_that_fails_is_refused_until_it_is_marked_consistent() -> None:
    consistency = Consistency()
    with consistency.changing("a load"):
        pass
    consistency.require()
    with pytest.raises(KeyboardInterrupt), consistency.changing("a load"):
        raise KeyboardInterrupt
    with pytest.raises(PolyaccelError) as caught:
        consistency.require()
    assert caught.value.value == "a load"
    with consistency.changing("another"):  # a load of some states alone
        pass
    with pytest.raises(PolyaccelError):
        consistency.require()
    consistency.mark_consistent()
    consistency.require()
