"""What `python -m bench watching` says of its turns, and what its variants switch on."""

from __future__ import annotations

import pytest

from bench.watching import compare
from bench.watching.worker import VARIANTS, config_of
from polyaccel.config import load_resolved


def test_turns_are_held_against_those_of_the_same_round() -> None:
    """Two ranks, three rounds; the machine was slow in the second, for both variants."""
    first = {"nothing": [1.0, 4.0, 1.0], "everything": [1.01, 4.04, 1.0]}
    second = {"nothing": [3.0, 8.0, 3.0], "everything": [3.03, 8.08, 3.04]}
    ranks = [{"cpu_s": first}, {"cpu_s": second}]
    assert compare._of(ranks, "nothing", "cpu_s") == [2.0, 6.0, 2.0]
    share, _ = compare._more(ranks, "everything", "nothing", "cpu_s")
    assert share == "+1.00 %"
    assert compare._more(ranks, "nothing", "nothing", "cpu_s") == ("-", "-")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_a_config(variant: str) -> None:
    """Each has what its name says and nothing else; `everything` has all of them."""
    base, own = config_of("nothing", 2, 4, "runs"), config_of(variant, 2, 4, "runs")
    assert load_resolved(own, world_size=2).zero_optimization.stage == 2
    added = set(own) - set(base)
    assert bool(added) == (variant != "nothing")
    if variant == "everything":
        rest = [set(config_of(one, 2, 4, "runs")) - set(base) for one in VARIANTS if one != variant]
        assert added == set().union(*rest, {"trace", "flops_profiler"})
