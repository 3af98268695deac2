"""One global batch that many world sizes can train with, from the section `elasticity`.

[Note: Elastic batch size]
A batch can be trained on W ranks when a micro-batch times W divides it. So a batch that many numbers of ranks suit is a
micro-batch, or the least common multiple of all of them, times a number with as many divisors as possible: the largest
highly composite one for which the batch stays within `max_train_batch_size`. Of these candidates the one wins that most
world sizes suit. Version 0.2 counts hosts instead of ranks: every rank of a host trains, so the batch is a multiple of
their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from polyaccel.config.sections.elasticity import ElasticityConfig
from polyaccel.errors import ConfigError, Problem

# fmt: off
HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)
# fmt: on
"""Numbers that have more divisors than any smaller one, up to 720720."""


@dataclass(frozen=True, slots=True)
class ElasticBatch:
    """The samples of an optimizer step, and the `world_sizes`, ascending, on which `micro_batch_sizes` make them up."""

    train_batch_size: int
    world_sizes: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]

    def micro_batch_size(self, world_size: int) -> int:
        """The micro-batch on one of the `world_sizes`: the first of `micro_batch_sizes` that fits."""
        samples = self.train_batch_size // world_size
        return next(size for size in self.micro_batch_sizes if samples % size == 0)

    def largest(self, most: int) -> int | None:
        """The largest of `world_sizes` that is not above `most`; None where there is none."""
        return max((size for size in self.world_sizes if size <= most), default=None)


def compute_elastic_config(section: ElasticityConfig) -> ElasticBatch:
    """Return the batch and its world sizes by `section.version`. See [Note: Elastic batch size]."""
    most = section.max_train_batch_size
    if not section.enabled or most is None:
        hint = 'write "enabled": true and max_train_batch_size'
        raise ConfigError([Problem("elasticity.enabled", section.enabled, "is off: no batch follows from it", hint)])
    ranks, step = 1, 1
    if section.version == 0.2:
        ranks = section.num_gpus_per_node
        step = ranks // section.model_parallel_size
    least_hosts, most_hosts = -(-section.min_gpus // ranks), section.max_gpus // ranks
    sizes = section.micro_batch_sizes
    found = [
        (batch, tuple(_suits(batch, sizes, least_hosts, most_hosts))) for batch in sorted(_batches(sizes, most // step))
    ]
    way = 1 if section.prefer_larger_batch else -1
    batch, counts = max(found, key=lambda each: (len(each[1]), way * each[0]), default=(0, ()))
    if not counts:
        expected = f"leaves no number of ranks from min_gpus = {section.min_gpus} to max_gpus = {section.max_gpus}"
        hint = "raise max_train_batch_size, allow smaller micro-batches, or widen min_gpus and max_gpus"
        raise ConfigError([Problem("elasticity", _shown(section), expected, hint)])
    is_first_best = section.version == 0.2 and not section.prefer_larger_batch
    preferred = tuple(dict.fromkeys(sizes if is_first_best else sorted(sizes, reverse=True)))
    return ElasticBatch(batch * step, tuple(count * step for count in counts), preferred)


def _batches(sizes: Sequence[int], most: int) -> set[int]:
    """The candidates: each micro-batch, and their least common multiple, times the largest highly composite number."""
    return {
        base * max(number for number in HIGHLY_COMPOSITE if number <= most // base)
        for base in (*sizes, lcm(*sizes))
        if base <= most
    }


def _suits(batch: int, sizes: Sequence[int], least: int, most: int) -> Iterator[int]:
    """The numbers from `least` to `most` whose product with one of `sizes` divides `batch`, ascending."""
    for count in range(max(1, least), min(most, batch // min(sizes)) + 1):
        if any(batch % (size * count) == 0 for size in sizes):
            yield count


def _shown(section: ElasticityConfig) -> dict[str, object]:
    names = ("max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "num_gpus_per_node")
    return {name: getattr(section, name) for name in names}
