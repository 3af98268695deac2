"""Training on a device with its own memory: every stage and every place of the states gives the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PARAMS_TOO = {**OFFLOADED, "offload_param": {"device": "cpu"}}
FP32_SETTINGS = {
    "0": ({"stage": 0}, {}, False),
    "1": ({"stage": 1}, {}, False),
    "2": ({"stage": 2}, {}, False),
    "2, without overlap": ({"stage": 2, "overlap_comm": False}, {}, False),
    "2, resumed": ({"stage": 2}, {}, True),
    "3": ({"stage": 3}, {}, False),
    "3, resumed": ({"stage": 3}, {}, True),
    "3, parameters on the host": (
        {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
        {},
        False,
    ),
    "3, fixed order": ({"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_fixed_order": True}, {}, False),
}
HOST_SETTINGS = {
    "1, host": ({"stage": 1, **OFFLOADED}, {}, False),
    "2, host, resumed": ({"stage": 2, **OFFLOADED}, {}, True),
    "3, host": ({"stage": 3, **OFFLOADED}, {}, False),
    "3, host, parameters too": ({"stage": 3, **PARAMS_TOO}, {}, False),
}
EARLY_SETTINGS = {  # without clipping, updates on the host begin while the device still computes
    f"{name}, early": (zero, {"gradient_clipping": 0.0}, resume) for name, (zero, _, resume) in HOST_SETTINGS.items()
}
DROPOUT = {"dropout": 0.2}
CUT_SETTINGS: dict[str, tuple[Any, Any, bool]] = {
    f"{name}, cut": (zero, {"tensor_parallel": {"autotp_size": 2}, **DROPOUT}, False)
    for name, (zero, _, resume) in (FP32_SETTINGS | HOST_SETTINGS).items()
    if not resume
}
SHARED_SETTINGS: dict[str, tuple[Any, Any]] = {
    "ulysses": ({"stage": 1}, {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ulysses"}}),
    "ring": ({"stage": 3}, {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ring"}}),
    "tensor": ({"stage": 2}, {"tensor_parallel": {"autotp_size": 2}}),
    "tensor and tokens": ({"stage": 3}, {"tensor_parallel": {"autotp_size": 2, "sequence_sharded": True}}),
    "stages": ({"stage": 1}, {"pipeline": {"stages": 2}}),
    "stages, zero bubble": ({"stage": 2}, {"pipeline": {"stages": 2, "schedule": "zb-h1"}}),
    "stages, host": ({"stage": 3, **PARAMS_TOO}, {"pipeline": {"stages": 2}}),
}
WITH_STAGES: dict[str, tuple[Any, Any]] = {
    "tensor and stages": ({"stage": 1}, {"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}}),
    "sequence and stages": ({"stage": 1}, {"sequence_parallel_size": 2, "pipeline": {"stages": 2}}),
}
EXPERTS = {"has_experts": True, "expert_parallel": {"enabled": True, "autoep_size": 2}}
EXPERTS_WITH_STAGES: dict[str, tuple[Any, Any]] = {
    "experts": ({"stage": 2}, EXPERTS),
    "experts and stages": ({"stage": 1}, {**EXPERTS, "pipeline": {"stages": 2}}),
}
BF16_SETTINGS = {f"{name}, bf16": (zero, BF16, resume) for name, (zero, _, resume) in FP32_SETTINGS.items()}
AWAITED = {"bf16": {"enabled": True}, "gradient_clipping": 0.0}
UNREAD = {"bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": 0.0}
UNREAD_SETTINGS = {  # the host waits for the norm of the first, and begins the updates of the others without it
    "1, bf16, awaited": ({"stage": 1}, AWAITED, False),
    **{f"{stage}, bf16, unread": ({"stage": stage}, UNREAD, stage == 2) for stage in range(4)},
    "3, sharded, unread": ({"stage": 3, "stage3_param_persistence_threshold": 0}, UNREAD, False),
    "3, fixed, unread": (FP32_SETTINGS["3, fixed order"][0], UNREAD, False),
}


def train(
    world: int, settings: dict[str, Any], device: str = "simdev", script_name: str = "train.py"
) -> dict[str, Any]:
    """What the script printed of each setting."""
    script = Path(__file__).with_name(script_name)
    job = subprocess.run(
        [sys.executable, "-m", "polyaccel", "run", "--nproc", str(world), str(script), json.dumps(settings)],
        env={**os.environ, "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [line for line in job.stdout.splitlines() if "RESULT" in line]
    assert (job.returncode, len(lines)) == (0, 1), job.stdout + job.stderr
    result = json.loads(lines[0].partition("RESULT ")[2])
    assert result["device"] == device
    assert result["runs"].keys() == settings.keys()
    return dict(result["runs"])


@pytest.mark.parametrize("world", [1, 2])
def test_stages_and_places_of_states_change_nothing(world: int) -> None:
    found = train(world, {**FP32_SETTINGS, **HOST_SETTINGS, **EARLY_SETTINGS, **BF16_SETTINGS, **UNREAD_SETTINGS})
    # The host's kernels round in another order, so that those are compared among themselves.
    for settings in (FP32_SETTINGS, HOST_SETTINGS, EARLY_SETTINGS, BF16_SETTINGS, UNREAD_SETTINGS):
        names = iter(settings)
        first = found[next(names)]
        assert [name for name in names if found[name] != first] == []
    (reference,) = train(world, {"2": FP32_SETTINGS["2"]}, device="cpu").values()
    for name in ("0", "1, host"):
        assert found[name]["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert found[name]["norms"] == pytest.approx(reference["norms"], rel=1e-5)


def test_ranks_that_share_layers_train_what_one_rank_trains() -> None:
    found, (alone,) = train(2, CUT_SETTINGS), train(1, {"2": ({"stage": 2}, DROPOUT, False)}).values()
    for name, run in found.items():
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert run["norms"] == pytest.approx(alone["norms"], rel=1e-5), name
    assert len({run["bits"] for name, run in found.items() if "host" not in name}) == 1


def test_ranks_that_share_a_model_of_transformers_train_what_one_rank_trains() -> None:
    """Its sequences, its layers, the tokens between layers, and its blocks as stages of a pipeline."""
    found = train(2, SHARED_SETTINGS, script_name="train_transformers.py")
    (alone,) = train(1, {"2": ({"stage": 2}, {})}, "cpu", "train_transformers.py").values()
    for name, run in found.items():
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert run["norms"] == pytest.approx(alone["norms"], rel=1e-4), name


def test_ranks_that_share_the_layers_of_a_stage_train_what_one_rank_trains() -> None:
    """The model is tried on the host before it is cut into stages, and its layers exchange there too."""
    found = train(4, {**WITH_STAGES, **EXPERTS_WITH_STAGES}, script_name="train_transformers.py")
    references = {"dense": ({"stage": 2}, {}), "experts": ({"stage": 2}, {"has_experts": True})}
    alone = train(1, references, "cpu", "train_transformers.py")
    for name, run in found.items():
        reference = alone["experts" if name in EXPERTS_WITH_STAGES else "dense"]
        assert run["losses"] == pytest.approx(reference["losses"], rel=1e-5), name
        assert run["norms"] == pytest.approx(reference["norms"], rel=1e-4), name


def test_torchs_own_data_parallel_works_on_it() -> None:
    script = """
import torch, torch.distributed as dist, polyaccel_simdev.device
dist.init_process_group("cpu:gloo,simdev:simcomm")
torch.simdev.set_device(dist.get_rank())
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3).to("simdev"))
model(torch.full((2, 4), 1.0 + dist.get_rank(), device="simdev")).sum().backward()
gradient = model.module.weight.grad
assert gradient.device == torch.device("simdev", dist.get_rank())
assert torch.equal(gradient.cpu(), torch.full((3, 4), 3.0)), gradient
dist.destroy_process_group()
"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    job = subprocess.run(
        [*torchrun, sys.executable, "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert job.returncode == 0, job.stdout + job.stderr
