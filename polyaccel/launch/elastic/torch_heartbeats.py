"""Signs of life between the agents of a job: who is lost is noticed while its ranks' peers hang in a collective.

torch's agents see a host that comes. One that is lost they see by ranks that fail, and those of the others may hang for
as long as a collective's time limit. So each agent counts in the store of the rendezvous, and looks at what the others
count.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from math import inf
from time import monotonic, sleep

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from polyaccel.launch.elastic.torch_rendezvous_store import RendezvousStore, say

_EVERY_S = 0.5
_LOST_S = 5.0
"""An agent that has not counted for so long is lost."""
_CUT_OFF_S = 10.0
"""An agent that has not reached the store for so long ends itself: the others have given it up."""
_FIRST_S = 60.0
"""Until an agent counts for the first time in a round it may take so much longer."""
_ENDED, _LEFT = "ended", "left"


class AgentHeartbeats:
    """This agent's count, and what it sees of the others'. Ends this process when it is cut off from `place`."""

    def __init__(self, place: RendezvousStore) -> None:
        self._place = place
        limit = timedelta(seconds=_CUT_OFF_S)
        self._store = TCPStore(place.address, place.port, is_master=False, wait_for_workers=False, timeout=limit)
        self._lock = threading.Lock()
        self._round: tuple[str, int, int] | None = None
        self._word = ""
        self._seen: dict[int, tuple[str, float]] = {}
        self._reached_s = monotonic()
        for work in (self._count, self._watch):
            threading.Thread(target=work, daemon=True, name="polyaccel beats").start()

    def begin(self, token: str, number: int, count: int) -> None:
        """The agents' next round, in which this one has that number of `count`."""
        with self._lock:
            self._round = (token, number, count)
            first_s = monotonic() + _FIRST_S
            self._seen = {each: ("", first_s) for each in range(count) if each != number}

    def end_well(self) -> None:
        """This host's ranks have ended well: it is not lost, whatever it does from now on."""
        self._word = _ENDED
        self._say()

    def leave(self) -> None:
        """This host ends its part: the others need not wait until it is lost."""
        if self._word != _ENDED:
            self._word = _LEFT
            self._say()

    def lost(self) -> list[int]:
        """The numbers of the agents that are lost."""
        with self._lock:
            now = monotonic()
            return [number for number, (_, seen_s) in self._seen.items() if now - seen_s > _LOST_S]

    def awaits_others(self) -> bool:
        """Whether all agents are there, and ranks of another one have not ended."""
        with self._lock:
            words = {word for word, _ in self._seen.values()}
        return not self.lost() and words - {_ENDED} != set()

    def _say(self, count: int = 0) -> None:
        with suppress(Exception):  # whatever the store raises, it was not reached
            current = self._round
            if current is None:
                self._store.check([""])
            else:
                token, number, _ = current
                self._store.set(f"polyaccel/{token}/{number}", self._word or str(count))
                self._look(current)
            self._reached_s = monotonic()

    def _look(self, current: tuple[str, int, int]) -> None:
        token, number, count = current
        keys = {other: f"polyaccel/{token}/{other}" for other in range(count) if other != number}
        said = {other: self._store.get(key).decode() for other, key in keys.items() if self._store.check([key])}
        seen_s = {_ENDED: inf, _LEFT: -inf}
        with self._lock:
            if self._round == current:
                for other, word in said.items():
                    if self._seen[other][0] != word:
                        self._seen[other] = (word, seen_s.get(word, monotonic()))

    def _count(self) -> None:
        count = 0
        while True:
            count += 1
            self._say(count)
            sleep(_EVERY_S)

    def _watch(self) -> None:
        while monotonic() - self._reached_s < _CUT_OFF_S:
            sleep(_EVERY_S)
        say(f"nothing is received from {self._place.address}, the rendezvous of the hosts: this host's part ends")
        os._exit(0 if self._word == _ENDED else 1)
