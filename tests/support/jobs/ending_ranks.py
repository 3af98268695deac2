"""Ranks that train together, of which one ends in some way: one job after another, each with processes of its
own that are forked from this one, which has imported everything.

    python ending_ranks.py '[["shm", 2, "sys.exit(0)", 1], ...]' FOLDER    # backend, stage, way, rank

Prints a JSON object for each job: the ranks' exit codes (negative: a signal) and what they wrote to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parity_models import make_config, parity_loss, parity_model

import polyaccel.torch.initialize
from polyaccel import comm
from polyaccel.comm.init.backends import comm_backend
from polyaccel.job.ports import free_port

WORLD, STEPS, LAST = 3, 4, 2
LIMIT_S = 100
"""For a job. Collectives have more, so that nothing here ends by their limit."""


def fail(error: BaseException) -> Callable[..., Any]:
    def raise_it(*_: object) -> None:
        raise error

    return raise_it


def too_large(*_: object) -> None:
    torch.empty(1 << 60)


def more(engine: Any, step: int) -> None:
    comm.barrier()


def end_here(code: int) -> Callable[[Any, int], None]:
    return lambda engine, step: sys.exit(code)


def in_backward(error: BaseException) -> Callable[[Any, int], None]:
    """The next backward pass raises when half of it is done."""

    def arm(engine: Any, step: int) -> None:
        engine.module.narrow.register_full_backward_hook(fail(error))

    return arm


def goes_on_after(error: BaseException) -> Callable[[Any, int], None]:
    """The next backward pass raises, and the script takes no notice."""

    def arm(engine: Any, step: int) -> None:
        handle = engine.module.narrow.register_full_backward_hook(fail(error))
        try:
            engine.backward(parity_loss(engine, step, 0, comm.get_rank()))
        except type(error):
            handle.remove()

    return arm


def in_forward(what: Callable[..., Any]) -> Callable[[Any, int], None]:
    return lambda engine, step: engine.module.wide.register_forward_pre_hook(what) and None


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."
WAYS: dict[str, Callable[[Any, int], object]] = {
    "memory of a device in forward": in_forward(fail(torch.OutOfMemoryError(CUDA))),
    "memory of the host in forward": in_forward(too_large),
    "memory in backward": in_backward(MemoryError("40 GiB")),
    "an exception in forward": in_forward(fail(ValueError("no such token\nand more"))),
    "an exception in backward": in_backward(KeyError("missing")),
    "an exception that the script ignores": goes_on_after(RuntimeError("of one rank")),
    "Ctrl-C": in_forward(fail(KeyboardInterrupt())),
    "sys.exit(0)": end_here(0),
    "sys.exit(3)": end_here(3),
    "os._exit(0)": lambda engine, step: os._exit(0),
    "os._exit(9)": lambda engine, step: os._exit(9),
    "SIGKILL": lambda engine, step: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda engine, step: os.abort(),
    "out of data": lambda engine, step: STEPS,
    "one more collective": more,
    "one collective less": lambda engine, step: "skip",
}


def train(backend: str, stage: int, way: str, who: int) -> None:
    """What the script of a rank does. Rank `who` goes its own way before its third step."""
    is_debug = way.startswith("one ")
    comm.init_distributed(config={"comm": {"backend": backend, "timeout_s": 2 * LIMIT_S, "debug": is_debug}})
    engine = polyaccel.initialize(model=parity_model(), config=make_config(stage))[0]
    rank, step = comm.get_rank(), 0
    while step < STEPS:
        is_apart = rank == who and step == 2
        told = WAYS[way](engine, step) if is_apart else None
        if told == STEPS:
            break
        engine.backward(parity_loss(engine, step, 0, rank))
        engine.step()
        if told != "skip":
            comm.barrier()
        step += 1


def main() -> None:
    folder = Path(sys.argv[2])
    for backend in ("shm", "gloo"):  # imported once, and not by every rank
        comm_backend(backend).probe()
    for number, case in enumerate(json.loads(sys.argv[1])):
        port = str(free_port())
        ranks = []
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
                os.environ |= {key: str(value) for key, value in place.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                error = os.open(folder / f"{number}-{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(error, 2)
                signal.alarm(LIMIT_S)
                train(*case)
                return  # and the interpreter ends as after every script
            ranks.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        said = [(folder / f"{number}-{rank}").read_text(errors="replace") for rank in range(WORLD)]
        print(json.dumps({"codes": codes, "said": said}), flush=True)


if __name__ == "__main__":
    main()
