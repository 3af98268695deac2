"""The section `elasticity`: the same samples a step on every number of ranks that it allows, by DeepSpeed's rules."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.config import load_config, load_resolved
from polyaccel.config.elastic import HIGHLY_COMPOSITE, ElasticBatch, compute_elastic_config
from polyaccel.config.load import draft_config
from polyaccel.config.sections.elasticity import ElasticityConfig
from polyaccel.errors import ConfigError
from polyaccel.planner.assumptions import planned_config

EXAMPLE: dict[str, Any] = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "min_time": 20,
    "version": 0.1,
}
"""DeepSpeed's own, in its documentation."""

sections = st.builds(
    lambda sizes, factor, least, more, version, ranks, larger: ElasticityConfig(
        enabled=True,
        micro_batch_sizes=tuple(sizes),
        max_train_batch_size=max(sizes) * factor,
        min_gpus=least,
        max_gpus=least + more,
        version=version,
        num_gpus_per_node=ranks,
        prefer_larger_batch=larger,
    ),
    st.lists(st.integers(1, 24), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(1, 6),
    st.integers(0, 400),
    st.sampled_from([0.1, 0.2]),
    st.sampled_from([1, 2, 3, 8]),
    st.booleans(),
)


def _found(section: ElasticityConfig) -> ElasticBatch | None:
    try:
        return compute_elastic_config(section)
    except ConfigError:
        return None


def test_highly_composite_numbers_have_more_divisors_than_any_smaller_one() -> None:
    divisors = [0] * 30001
    for number in range(1, len(divisors)):
        for multiple in range(number, len(divisors), number):
            divisors[multiple] += 1
    most = list(accumulate(divisors, max))
    records = [number for number in range(1, len(divisors)) if divisors[number] > most[number - 1]]
    assert [number for number in HIGHLY_COMPOSITE if number < len(divisors)] == records


@given(sections)
@settings(max_examples=60, deadline=None)
def test_a_step_has_the_same_samples_on_every_number_of_ranks(section: ElasticityConfig) -> None:
    found = _found(section)
    if found is None:
        return
    assert found.train_batch_size <= (section.max_train_batch_size or 0)
    assert found.world_sizes == tuple(sorted(set(found.world_sizes)))
    assert found.world_sizes[0] >= section.min_gpus
    assert found.world_sizes[-1] <= section.max_gpus
    for world_size in found.world_sizes:
        micro = found.micro_batch_size(world_size)
        assert micro in section.micro_batch_sizes
        assert found.train_batch_size % (micro * world_size) == 0
        if section.version == 0.2:
            assert world_size % section.num_gpus_per_node == 0
    chosen = (found.world_sizes[0], found.world_sizes[-1], found.largest(found.world_sizes[-1] + 1))
    resolved = [load_resolved({"elasticity": section.model_dump()}, world_size=each or 0) for each in chosen]
    assert {each.train_batch_size for each in resolved} == {found.train_batch_size}
    for size, each in zip(chosen, resolved, strict=True):
        product = each.train_micro_batch_size_per_gpu * each.gradient_accumulation_steps * (size or 0)
        assert product == found.train_batch_size


@given(sections)
@settings(max_examples=40, deadline=None)
def test_no_number_of_ranks_that_a_micro_batch_allows_is_left_out(section: ElasticityConfig) -> None:
    found = _found(section)
    if found is None:
        return
    ranks = section.num_gpus_per_node if section.version == 0.2 else 1
    batch = found.train_batch_size
    expected = [
        size
        for size in range(section.min_gpus, min(section.max_gpus, batch) + 1)
        if size % ranks == 0 and any(batch % (micro * size) == 0 for micro in section.micro_batch_sizes)
    ]
    assert list(found.world_sizes) == expected


def test_the_example_of_deepspeeds_documentation() -> None:
    """Its page says: 9792 samples, and these numbers of GPUs."""
    found = compute_elastic_config(ElasticityConfig(**{**EXAMPLE, "micro_batch_sizes": (8, 12, 16, 17)}))
    assert found.train_batch_size == 9792
    assert found.world_sizes == (
        *(32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612, 816, 1224),
    )
    assert found.micro_batch_size(64) == 17
    assert found.micro_batch_size(68) == 16


@pytest.mark.parametrize(("larger", "batch"), [(True, 24), (False, 18)])
def test_of_batches_that_suit_equally_many_the_wish_decides(larger: bool, batch: int) -> None:
    section = ElasticityConfig(
        enabled=True,
        max_train_batch_size=24,
        micro_batch_sizes=(2, 3),
        max_gpus=1,
        version=0.1,
        prefer_larger_batch=larger,
    )
    assert compute_elastic_config(section).train_batch_size == batch


def test_the_first_micro_batch_that_fits_is_taken_where_larger_ones_are_not_preferred() -> None:
    section = ElasticityConfig(
        enabled=True, max_train_batch_size=24, micro_batch_sizes=(2, 3, 6), prefer_larger_batch=False
    )
    assert compute_elastic_config(section).micro_batch_size(2) == 2
    assert compute_elastic_config(section.model_copy(update={"version": 0.1})).micro_batch_size(2) == 6


SMALL = {"elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3]}}


def test_a_number_of_ranks_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        load_resolved(SMALL, world_size=5)
    (problem,) = caught.value.problems
    assert problem.key == "world_size"
    assert "12 samples a step: 1, 2, 3, 4, 6" in problem.expected
    assert problem.hint.startswith("start 4 ranks")


def test_batch_sizes_beside_it_say_the_same_or_are_ignored_on_request() -> None:
    resolved = load_resolved(SMALL, world_size=2)
    assert load_resolved(resolved.model_dump(), world_size=2) == resolved
    with pytest.raises(ConfigError) as caught:
        load_resolved({**SMALL, "train_batch_size": 8}, world_size=2)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("train_batch_size", 8)]
    ignoring = {"elasticity": {**SMALL["elasticity"], "ignore_non_elastic_batch_info": True}, "train_batch_size": 8}
    ignored = load_resolved(ignoring, world_size=2)
    assert ignored.train_batch_size == 12
    assert "train_batch_size = 8 is ignored: elasticity decides it, 12 on 2 ranks" in ignored.without_effect


def test_what_others_fill_in_for_auto_does_not_contradict_it() -> None:
    config = {**SMALL, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    resolved = load_resolved(config, world_size=3, hints={"per_device_train_batch_size": 7, "train_batch_size": 21})
    assert (resolved.train_batch_size, resolved.train_micro_batch_size_per_gpu) == (12, 2)


def test_a_section_that_is_off_decides_nothing() -> None:
    config = load_config({"train_batch_size": 8, "elasticity": {"enabled": False, "max_train_batch_size": 4}})
    assert load_resolved(config, world_size=2).train_batch_size == 8
    with pytest.raises(ConfigError) as caught:
        compute_elastic_config(config.elasticity)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("elasticity.enabled", False)]


def test_a_model_that_is_cut_over_ranks_is_refused() -> None:
    section = {**SMALL["elasticity"], "num_gpus_per_node": 2, "model_parallel_size": 2}
    (problem,) = draft_config({"elasticity": section}).problems
    assert problem.key == "elasticity.model_parallel_size"


def test_a_plan_is_made_for_any_number_of_ranks() -> None:
    assert planned_config(SMALL, 4).config.train_batch_size == 12
    assert planned_config(SMALL, 4).assumptions == ()
    planned = planned_config(SMALL, 5)
    assert "12 does not fit" in planned.assumptions[0]


def test_a_section_that_no_number_of_ranks_suits_is_refused() -> None:
    section = ElasticityConfig(enabled=True, max_train_batch_size=4, micro_batch_sizes=(2,), min_gpus=3)
    with pytest.raises(ConfigError) as caught:
        compute_elastic_config(section)
    (problem,) = caught.value.problems
    assert problem.key == "elasticity"
    assert "from min_gpus = 3" in problem.expected
    assert problem.hint
