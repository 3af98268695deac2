"""A script written for DeepSpeed, started by the command `deepspeed` of the drop-in, trains what plain torch trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dropin_hello import ACCUMULATION, MICRO_BATCH, build, reference

from polyaccel.job.ports import free_port

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "plugins" / "polyaccel-deepspeed"
SCRIPT = ROOT / "tests" / "support" / "jobs" / "dropin_hello.py"


def command(name: str, *arguments: str) -> list[str]:
    code = f"import sys; from polyaccel_deepspeed.commands import {name}; sys.exit({name}())"
    return [sys.executable, "-c", code, *arguments]


def run(name: str, *arguments: str, timeout_s: int = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(name, *arguments),
        env={**os.environ, "PYTHONPATH": str(PLUGIN)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_script_trains_as_it_is(stage: int, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "steps_per_print": float("inf"),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 1e12},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    done = run(
        "launch", "--num_gpus", "2", str(SCRIPT), "--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json"),
        "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads((tmp_path / "losses.json").read_text(encoding="utf-8"))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference()), rtol=1e-5, atol=0)
    said = done.stdout + done.stderr
    assert said.count("DeepSpeed's names over polyaccel") == 1
    assert said.count("steps_per_print = Infinity was dropped") == 1
    assert said.count("sub_group_size = 1000000000000.0 has no effect") == 1

    converted = run("zero_to_fp32", str(tmp_path), str(tmp_path / "whole.bin"))
    assert converted.returncode == 0, converted.stdout + converted.stderr
    whole = torch.load(tmp_path / "whole.bin", weights_only=True)
    assert {name: value.shape for name, value in whole.items()} == {
        name: value.shape for name, value in build().state_dict().items()
    }


def test_several_hosts_are_started_by_hand(tmp_path: Path) -> None:
    """The same command twice, as on two hosts, each with a rank of its own."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nsecond slots=1\n", encoding="utf-8")
    (tmp_path / "job.py").write_text(
        "import deepspeed, os, sys\n"
        "deepspeed.init_distributed()\n"
        "found = [None, None]\n"
        "deepspeed.comm.all_gather_object(found, [os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'CROSS_RANK')])\n"
        "print('met', found, sys.argv[1:], flush=True)\n"
        "deepspeed.comm.destroy_process_group()\n"
    )
    port = str(free_port())
    jobs = [
        subprocess.Popen(
            command(
                "launch", "--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--node_rank", str(number),
                "--master_port", port, str(tmp_path / "job.py"),
            ),
            env={**os.environ, "PYTHONPATH": str(PLUGIN)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        for job in jobs:
            said = job.communicate(timeout=120)[0]
            assert job.returncode == 0, said
            assert "met [['0', '0', '0'], ['1', '0', '1']] ['--local_rank=0']" in said
    finally:
        for job in jobs:
            job.kill()


def test_collectives_are_timed() -> None:
    done = run("bench", "--num_gpus", "2", "--maxsize", "13", "--trials", "1", "--scan", "--broadcast", "--all-to-all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 8192 ") == 2
    assert "---- all_to_all, 2 ranks" in done.stdout


def test_what_the_command_cannot_do_is_one_sentence_and_a_cure() -> None:
    done = run("launch", "--num_nodes", "2", "train.py")
    assert done.returncode == 1
    assert done.stderr.startswith("deepspeed: error: --num-nodes 2, and 1 host is given")
    assert "hint" in done.stderr


def test_a_recipe_of_long_sequences_trains_what_plain_torch_trains(tmp_path: Path) -> None:
    from dropin_long_sequences import BATCHES, RANKS, plain_losses

    out, script = tmp_path / "losses.json", ROOT / "tests" / "support" / "dropin_long_sequences.py"
    models = ROOT / "tests" / "support" / "models"
    done = subprocess.run(
        command("launch", "--num_gpus", str(RANKS), "--master_port", str(free_port()), str(script), "--out", str(out)),
        env={**os.environ, "PYTHONPATH": f"{PLUGIN}{os.pathsep}{models}", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["steps"] == BATCHES * RANKS
    assert found["losses"] == pytest.approx(plain_losses(), rel=1e-5)
