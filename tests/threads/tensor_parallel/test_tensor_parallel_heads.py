"""Attention heads over ranks: every query once, with the key that it attends to."""

from __future__ import annotations

import pytest

from polyaccel.errors import ShardingError
from polyaccel.torch.tensor_parallel.heads import cut_heads

CASES = [(q, k, r) for k in range(1, 9) for q in range(k, 25, k) for r in range(1, 9) if q >= r]


def test_every_query_has_one_rank_and_there_the_key_that_it_had():
    for queries, keys, ranks in CASES:
        parts = cut_heads(queries, keys, ranks, "attention")
        seen = []
        for (first, count), own, group in zip(parts.queries, parts.keys, parts.groups, strict=True):
            assert count > 0
            assert count == len(own) * group  # as attention repeats the keys
            for place in range(count):
                assert own[place // group] == (first + place) // (queries // keys)
            seen += range(first, first + count)
        assert seen == list(range(queries))
        if parts.are_keys_cut:
            assert [key for own in parts.keys for key in own] == list(range(keys))


def test_ranks_differ_by_one_key_head_at_most_or_by_one_query():
    for queries, keys, ranks in CASES:
        parts = cut_heads(queries, keys, ranks, "attention")
        counts = parts.key_counts if parts.are_keys_cut else parts.query_counts
        assert max(counts) - min(counts) <= 1
        assert parts.are_keys_cut == (keys >= ranks)


def test_keys_that_several_ranks_share_are_not_repeated_where_they_need_not_be():
    parts = cut_heads(8, 2, 4, "attention")
    assert parts.keys == ((0,), (0,), (1,), (1,))
    assert parts.key_runs(16) == (((0, 16),), ((0, 16),), ((16, 16),), ((16, 16),))
    assert cut_heads(8, 2, 3, "attention").keys == ((0,), (0, 1, 1), (1,))
    assert cut_heads(8, 4, 3, "attention").key_runs(2) == (((0, 4),), ((4, 2),), ((6, 2),))


@pytest.mark.parametrize(("queries", "keys", "value"), [(2, 2, 2), (5, 2, (5, 2))])
def test_heads_that_cannot_be_shared_name_the_module_and_the_cure(queries: int, keys: int, value: object) -> None:
    with pytest.raises(ShardingError) as caught:
        cut_heads(queries, keys, 3, "layers.0.attention")
    assert caught.value.value == value
    assert "layers.0.attention" in str(caught.value)
    assert "tensor_parallel." in caught.value.hint
