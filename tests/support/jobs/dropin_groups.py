"""Ranks that share sequences and weights by the drop-in's config, asked for DeepSpeed's groups and token mappings."""

from __future__ import annotations

import argparse
import json

import deepspeed
import torch
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.utils import groups
from torch import distributed as dist
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(inputs))


def calls_of_a_step(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether `comms_logger` holds the calls of this step alone, by all its names."""
    log = deepspeed.comm.comms_logger
    log.comms_dict = {}
    assert not deepspeed.comm.has_comm_data()
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    records = log.comms_dict
    calls = [call for sizes in records.values() for call in sizes.values()]
    assert all(len(column) == call[0] for call in calls for column in call[1:])
    assert deepspeed.comm.get_comm_operation_count() == sum(call[0] for call in calls)
    assert set(deepspeed.comm.get_logged_comm_ops()) == set(records)
    assert set(deepspeed.comm.log_summary(return_dict=True)) == set(records)
    deepspeed.comm.reset_log()
    assert log.get_raw_data() == {}
    return any("reduce" in name for name in records)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--axis", choices=("tensor", "sequence"))
    parser.add_argument("--local_rank", type=int, default=-1)
    axis = parser.parse_args().axis
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "comms_logger": {"enabled": True, "prof_all": True},
    }
    if axis == "tensor":
        specs = [{"patterns": ["up"]}, {"patterns": ["down"], "partition_type": "row"}]
        config["tensor_parallel"] = {"autotp_size": 2, "partition_config": {"layer_specs": specs}}
    else:
        config |= {"sequence_parallel_size": 2, "sequence_parallel": {"method": "manual"}}
    engine, *_ = deepspeed.initialize(model=Model(), config=config)
    rank = dist.get_rank()
    logged = calls_of_a_step(engine)
    tokens = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = gather_tokens(tokens)
    (gathered * torch.arange(len(gathered)).unsqueeze(1)).sum().backward()
    whole = torch.arange(4.0, requires_grad=True)
    dropped = drop_tokens(whole)
    (dropped * (rank + 1)).sum().backward()
    print(
        json.dumps(
            {
                "rank": rank,
                "gathered": gathered[:, 0].tolist(),
                "gradient": tokens.grad[:, 0].tolist(),
                "dropped": dropped.tolist(),
                "gradient of whole": whole.grad.tolist(),
                "data": dist.get_world_size(engine.data_parallel_group),
                "data of groups": dist.get_world_size(groups._get_data_parallel_group()),
                "logged": logged,
                "tokens": dist.get_world_size(engine.seq_data_parallel_group),
                "sequence": 1 if engine.seq_parallel_group is None else dist.get_world_size(engine.seq_parallel_group),
                "sizes": [engine.seq_dp_world_size, engine.sequence_parallel_size, engine.checkpoint_mp_rank],
            }
        ),
        flush=True,
    )


main()
