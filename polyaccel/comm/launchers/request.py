"""A request to discovery, the answer of a source that looks at it, and the reading of rank variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyaccel.comm.base import DEFAULT_TIMEOUT_S, Rendezvous
from polyaccel.errors import CommError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
VARIABLES = RANK_VARIABLES + MEETING_VARIABLES
DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"  # the number, because some machines cannot look up even "localhost"


@dataclass(frozen=True, slots=True)
class Request:
    """The caller's arguments (None: not given), whether MPI may be asked, and the environment to look in."""

    environ: Mapping[str, str]
    rank: int | None = None
    world_size: int | None = None
    init_method: str | None = None
    port: int | None = None
    joined: tuple[int, int] | None = None
    """Rank and world size in a process group that the script made."""
    ask_mpi: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def has_meeting(self) -> bool:
        """The environment sets the rendezvous."""
        return all(name in self.environ for name in MEETING_VARIABLES)


class Detection(NamedTuple):
    """A source's answer: whether it applies, and the variables or the reason that show it."""

    applies: bool
    text: str


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """Where a process stands among the ranks, by the variables of one launcher; None without them."""

    launcher: str
    rank: int
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    shown: str
    """The variables and their values."""

    @property
    def is_complete(self) -> bool:
        return None not in (self.world_size, self.local_rank, self.local_world_size)

    def meeting(self, address: str | None, port: int | None, init_method: str | None = None) -> Rendezvous:
        """The rendezvous there; one rank alone needs none. Raises CommError unless the place is complete."""
        if self.world_size == 1:
            return Rendezvous(0, 1, 0, 1, None, None, self.launcher, init_method)
        if self.world_size is None or self.local_rank is None or self.local_world_size is None:
            raise CommError(
                f"{self.launcher} does not set how many ranks there are, here and in all: {self.shown}",
                hint="pass its variables on where they are filtered, as into a container",
                value=self.shown,
            )
        return Rendezvous(
            self.rank,
            self.world_size,
            self.local_rank,
            self.local_world_size,
            address,
            port,
            self.launcher,
            init_method,
        )


def integer(environ: Mapping[str, str], name: str, default: int) -> int:
    """The number in `name`, `default` where it is unset. Raises CommError."""
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise CommError(
            f"{name}={text!r} is not an integer: {shown(environ)}",
            hint=f"set {name} to a number, or unset all of them to run one process",
            value=text,
        ) from None


def meeting_port(environ: Mapping[str, str], default: int) -> int:
    """MASTER_PORT, or `default`. Raises CommError when it cannot be one."""
    port = integer(environ, "MASTER_PORT", default)
    if not 0 < port < 65536:  # 0 would let every rank listen on its own port, to which no rank connects
        raise CommError(
            f"MASTER_PORT {port} is not a valid port: {shown(environ)}",
            hint="set MASTER_PORT to one free port for all ranks, between 1 and 65535",
            value=port,
        )
    return port


def check_rank(rank: int, world_size: int, found: str, rank_name: str = "RANK", size_name: str = "WORLD_SIZE") -> None:
    """Raise CommError, showing what was `found`, unless `rank` is one of `world_size`."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise CommError(
            f"{rank_name} {rank} is not in a world of {world_size} ranks: {found}",
            hint=f"{rank_name} counts from 0 to {size_name} - 1",
            value=(rank, world_size),
        )


def check_agreement(environ: Mapping[str, str], launched: LaunchedRank) -> None:
    """Raise CommError, showing both, when rank variables are set that contradict `launched`."""
    said = (launched.rank, launched.world_size, launched.local_rank, launched.local_world_size)
    for name, number in zip(RANK_VARIABLES, said, strict=True):
        if number is not None and integer(environ, name, number) != number:
            raise CommError(
                f"{name}={environ[name]} is set, but {launched.launcher} sets {number}: "
                f"{shown(environ, RANK_VARIABLES)}; {launched.shown}",
                hint=f"unset what is left over of another job: {name}, or the variables of {launched.launcher}",
                value=(environ[name], number),
            )


def shown(environ: Mapping[str, str], names: Sequence[str] = VARIABLES) -> str:
    """The variables as they are set, by default all that torchrun sets."""
    return ", ".join(f"{name}={environ[name]}" if name in environ else f"{name} unset" for name in names)
