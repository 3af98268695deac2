"""Which attention heads each rank has. Integers only.

Where there are at least as many key heads as ranks, the key heads are cut, and each rank has its own queries. Where
there are fewer, the queries are cut, and each rank computes the keys that its queries need from weights that are whole:
a key head that two ranks need belongs to neither. The queries of a rank that go with different numbers to its keys get
a key each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from polyaccel.core.block import Run
from polyaccel.errors import ShardingError
from polyaccel.torch.tensor_parallel.plan import RunsOfRanks
from polyaccel.torch.tensor_parallel.ranks import even_parts


@dataclass(frozen=True)
class HeadParts:
    """The heads of each rank: a run of queries, and the keys that they attend to, in order."""

    queries: tuple[Run, ...]
    keys: tuple[tuple[int, ...], ...]
    are_keys_cut: bool

    @property
    def query_counts(self) -> tuple[int, ...]:
        return tuple(count for _, count in self.queries)

    @property
    def key_counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.keys))

    @property
    def groups(self) -> tuple[int, ...]:
        """Queries for each key of a rank."""
        return tuple(queries // keys for queries, keys in zip(self.query_counts, self.key_counts, strict=True))

    def query_runs(self, size: int) -> RunsOfRanks:
        """Features of the queries, where each head has `size`."""
        return tuple(((first * size, count * size),) for first, count in self.queries)

    def key_runs(self, size: int) -> RunsOfRanks:
        """Features of the keys, or of the values, where each head has `size`."""
        return tuple(_runs(keys, size) for keys in self.keys)


def cut_heads(queries: int, keys: int, ranks: int, name: str) -> HeadParts:
    """Cut `queries` heads that attend to `keys` heads over `ranks` ranks; errors call it `name`."""
    if keys < 1 or queries % keys:
        raise ShardingError(
            f"{name}: {queries} query heads cannot be shared by {keys} key heads",
            hint="leave the module out: tensor_parallel.partition_config.layer_specs with partition_type 'skip'",
            value=(queries, keys),
        )
    if queries < ranks:
        raise ShardingError(
            f"{name} has {queries} heads, which {ranks} tensor ranks cannot share",
            hint=f"set tensor_parallel.autotp_size to {queries} or less",
            value=queries,
        )
    group = queries // keys
    if keys >= ranks:
        counts = even_parts(keys, ranks)
        firsts = [0, *accumulate(counts)]
        return HeadParts(
            tuple((first * group, count * group) for first, count in zip(firsts, counts, strict=False)),
            tuple(tuple(range(first, first + count)) for first, count in zip(firsts, counts, strict=False)),
            True,
        )
    counts = even_parts(queries, ranks) if ranks % keys else even_parts(group, ranks // keys) * keys
    firsts = [0, *accumulate(counts)]
    runs = tuple(zip(firsts, counts, strict=False))
    return HeadParts(runs, tuple(_keys_of(first, count, group) for first, count in runs), False)


def _keys_of(first: int, count: int, group: int) -> tuple[int, ...]:
    """The keys of queries [first, first + count): each once where all have equally many of them, else one a query."""
    each = [query // group for query in range(first, first + count)]
    unique = sorted(set(each))
    return tuple(unique if len({each.count(key) for key in unique}) == 1 else each)


def _runs(heads: tuple[int, ...], size: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for head in heads:
        if runs and sum(runs[-1]) == head * size:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((head * size, size))
    return tuple(runs)
