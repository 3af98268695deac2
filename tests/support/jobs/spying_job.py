"""What a script finds that some launcher started: each rank's variables, the commands that joining ran, whether MPI was
started, and with `train` the losses of three steps. Rank 0 prints it as JSON after FOUND; with `fail` rank 1 raises."""

import json
import os
import sys

if "without-mpi4py" in sys.argv:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]

import torch

commands: list[object] = []
MEANING_COMMANDS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
GLOBAL_BATCH = 4


def spy(event: str, arguments: object) -> None:
    if event in MEANING_COMMANDS:
        commands.append((event, arguments))


def losses_of_three_steps() -> list[float]:
    """Over all ranks, which share one global batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    engine = polyaccel.initialize(model=model, config=config)[0]
    losses = []
    own = GLOBAL_BATCH // comm.get_world_size()
    batch = torch.randn(GLOBAL_BATCH, 8)[comm.get_rank() * own :][:own]
    for _ in range(3):
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        every: list[float] = [0.0] * comm.get_world_size()
        comm.all_gather_object(every, loss.item())
        losses.append(sum(every) / len(every))
    engine.destroy()
    return losses


sys.addaudithook(spy)
import polyaccel  # noqa: E402
from polyaccel import comm  # noqa: E402

polyaccel.init_distributed()
seen = [os.environ.get(name) for name in VARIABLES], list(commands), "mpi4py.MPI" in sys.modules
found = [None] * comm.get_world_size()
comm.all_gather_object(found, seen)
objects: list[object] = [None] * comm.get_world_size()
comm.all_gather_object(objects, frozenset({comm.get_rank()}))  # which is no plain value
assert objects == [frozenset({rank}) for rank in range(comm.get_world_size())]
if comm.get_rank() == 1 and "fail" in sys.argv:
    raise ValueError("rank 1 is ill")
losses = losses_of_three_steps() if "train" in sys.argv else []
comm.barrier()
rank = comm.get_rank()
comm.destroy_process_group()
if rank == 0 and int(os.environ.get("RANK", 0)) == 0:
    print("FOUND", json.dumps({"ranks": found, "losses": losses}), flush=True)
