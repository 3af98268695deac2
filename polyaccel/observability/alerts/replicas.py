"""Replicated weights: every rank digests its copy, piece by piece, and the digests of a piece must be equal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from zlib import crc32

from polyaccel.observability.alerts.settings import DigestReport, RankFigures
from polyaccel.observability.metrics import Alarm
from polyaccel.zero.buckets.bucket_params import Replica
from polyaccel.zero.trained_state import TrainedParams

PIECE_NUMEL = 1 << 18


class ReplicaDigests:
    """Digests this rank's copies, a part of them before each update, so that `steps` steps see all of them once.

    A step's part follows from its number alone, so all ranks digest the same pieces at the same time: the weights that
    the passes of that step have computed with. CRC-32 sees every flipped bit; it is not a proof against an adversary.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._params: TrainedParams | None = None
        self._pieces: Sequence[Replica] = ()

    def digest(self, step: int, params: TrainedParams) -> Iterator[DigestReport]:
        """The digests that are due before the update of `step`."""
        if params is not self._params:
            self._params, self._pieces = params, params.replicas(PIECE_NUMEL)
        turn, count = step % self._steps, len(self._pieces)
        for piece in self._pieces[turn * count // self._steps : (turn + 1) * count // self._steps]:
            digest = crc32(params.replica_bytes(piece))
            yield DigestReport(step, piece.fqn, piece.start, piece.ranks, digest)


def alarms_of_digests(figures: Sequence[RankFigures]) -> Iterator[Alarm]:
    """The ranks whose copies of parameters are not those of most others: an alarm for each set of these ranks."""
    digests: defaultdict[tuple[str, int, tuple[int, ...], int], dict[int, int]] = defaultdict(dict)
    for figure in figures:
        for step, fqn, start, ranks, digest in figure.digests:
            digests[fqn, step, ranks, start][figure.rank] = digest
    wrong: defaultdict[tuple[tuple[int, ...], int], dict[str, int]] = defaultdict(dict)
    for (fqn, step, _, _), by_rank in digests.items():
        counts = Counter(by_rank.values())
        if len(counts) < 2:
            continue
        (usual, times), *_ = counts.most_common(1)
        is_known = 2 * times > len(by_rank)
        ranks = tuple(sorted(rank for rank, digest in by_rank.items() if not is_known or digest != usual))
        wrong[ranks, times if is_known else 0].setdefault(fqn, step)
    for (ranks, others), names in wrong.items():
        fqn, step = next(iter(names.items()))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
        if others:
            what = f"{named} computed step {step:,} with other weights of {fqn!r}{more} than the {others} others"
        else:
            what = f"{named} computed step {step:,} with different weights of {fqn!r}{more}"
        hint = "stop, continue from a checkpoint before that, and test the memory and device of that host"
        if not others:
            hint = "stop, continue from a checkpoint before that, and test memory and devices of these hosts"
        value = float(len(names))
        yield Alarm(kind="replicas", step=step, value=value, ranks=ranks, sentence=f"{what}: {hint}")
