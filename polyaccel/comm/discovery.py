"""Who this process is among how many: the only reader of rank variables.

A table of sources is asked in order; the first that applies answers. Explicit arguments come first, then the variables
that torchrun and `polyaccel run` set, then a process group that the script made itself; else the world is one process,
for which nothing is looked up: no host name, no MPI, no network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from polyaccel.comm.base import Rendezvous
from polyaccel.comm.torch_pg import initialized_world
from polyaccel.errors import CommError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller said (None: nothing) and the environment to look in."""

    rank: int | None
    world_size: int | None
    init_method: str | None
    port: int
    environ: Mapping[str, str]


class Source(NamedTuple):
    """A row of the table: the source's name, whether it applies, and how it is read."""

    name: str
    applies: Callable[[Request], bool]
    read: Callable[[Request], Rendezvous]


def discover(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    port: int = DEFAULT_PORT,
    environ: Mapping[str, str] | None = None,
) -> Rendezvous:
    """The rendezvous of this process. `port` is used where the source names none.

    Raises CommError when the source that applies is incomplete or contradicts itself; the message shows all of it.
    """
    request = Request(rank, world_size, init_method, port, os.environ if environ is None else environ)
    for source in SOURCES:
        if source.applies(request):
            return source.read(request)
    return Rendezvous(0, 1, 0, 1, None, None, "no launcher")


def local_rank(*, default: int) -> int:
    """What the launcher said is this rank's number on its host; `default` if it said nothing."""
    return _integer(os.environ, "LOCAL_RANK", default)


def _from_arguments(request: Request) -> Rendezvous:
    given = f"rank={request.rank}, world_size={request.world_size}, init_method={request.init_method!r}"
    if request.rank is None or request.world_size is None:
        raise CommError(
            f"only part of the rendezvous was given: {given}",
            cure="give both rank and world_size, or neither",
            value=(request.rank, request.world_size),
        )
    _check_rank(request.rank, request.world_size, given)
    env = request.environ
    local_rank = _integer(env, "LOCAL_RANK", request.rank)
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", request.world_size)
    if request.world_size == 1:
        return Rendezvous(0, 1, 0, 1, None, None, "arguments", request.init_method)
    return Rendezvous(
        request.rank,
        request.world_size,
        local_rank,
        local_world_size,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _port(env, request.port),
        "arguments",
        request.init_method,
    )


def _from_torchrun(request: Request) -> Rendezvous:
    env = request.environ
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if missing:
        raise CommError(
            f"{' and '.join(missing)} not set, but other rank variables are: {_shown(env)}",
            cure="start the ranks with `polyaccel run` or torchrun, or unset the others",
            value=missing,
        )
    rank, world_size = _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1)
    _check_rank(rank, world_size, _shown(env))
    if world_size == 1:
        return Rendezvous(0, 1, _integer(env, "LOCAL_RANK", 0), 1, None, None, "torchrun variables")
    # DeepSpeed's launcher and ours also say LOCAL_SIZE; without either, all ranks are on this host.
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", _integer(env, "LOCAL_SIZE", world_size))
    local_rank = _integer(env, "LOCAL_RANK", rank % max(1, local_world_size))
    _check_rank(local_rank, local_world_size, _shown(env), "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if request.init_method is None and "MASTER_ADDR" not in env:
        raise CommError(
            f"{world_size} ranks, but MASTER_ADDR does not say where they meet: {_shown(env)}",
            cure="set MASTER_ADDR to the address of rank 0's host (127.0.0.1 for one host)",
            value=None,
        )
    port = _port(env, request.port)
    # torchrun's agent already listens on the port; only torch's own `env://` knows that.
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Rendezvous(
        rank,
        world_size,
        local_rank,
        local_world_size,
        env.get("MASTER_ADDR"),
        port,
        "torchrun variables",
        request.init_method or ("env://" if by_agent else None),
    )


def _from_process_group(request: Request) -> Rendezvous:
    rank, world_size = initialized_world() or (0, 1)
    local_rank = _integer(request.environ, "LOCAL_RANK", rank)
    local_world_size = _integer(request.environ, "LOCAL_WORLD_SIZE", world_size)
    return Rendezvous(rank, world_size, local_rank, local_world_size, None, None, "torch.distributed, initialised")


SOURCES = (
    Source("arguments", lambda r: r.rank is not None or r.world_size is not None, _from_arguments),
    Source("torchrun variables", lambda r: any(name in r.environ for name in VARIABLES[:4]), _from_torchrun),
    Source("torch.distributed", lambda r: initialized_world() is not None, _from_process_group),
)


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise CommError(
            f"{name}={text!r} is not an integer: {_shown(environ)}",
            cure=f"set {name} to a number, or unset all of them to run one process",
            value=text,
        ) from None


def _port(environ: Mapping[str, str], default: int) -> int:
    port = _integer(environ, "MASTER_PORT", default)
    if not 0 < port < 65536:  # 0 would let every rank listen on a port of its own, where nobody comes
        raise CommError(
            f"MASTER_PORT {port} is no port that ranks can meet on: {_shown(environ)}",
            cure="set MASTER_PORT to one free port for all ranks, between 1 and 65535",
            value=port,
        )
    return port


def _check_rank(rank: int, world_size: int, shown: str, rank_name: str = "RANK", size_name: str = "WORLD_SIZE") -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise CommError(
            f"{rank_name} {rank} is not in a world of {world_size} ranks: {shown}",
            cure=f"{rank_name} counts from 0 to {size_name} - 1",
            value=(rank, world_size),
        )


def _shown(environ: Mapping[str, str]) -> str:
    """All rank variables as they are set."""
    return ", ".join(f"{name}={environ[name]}" if name in environ else f"{name} unset" for name in VARIABLES)
