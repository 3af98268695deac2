"""A relative path means the working directory of the call that names it, whatever the program does later."""

from __future__ import annotations

import torch

import polyaccel

CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}},
    "run_dir": "run",
    "csv_monitor": {"enabled": True, "output_path": "csv"},
    "trace": {"steps": [1, 2], "dir": "trace"},
    "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "flops.txt"},
}


def step(engine):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()


def test_a_run_writes_where_its_calls_were_made(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("start", "first", "second")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    engine = polyaccel.initialize(model=torch.nn.Linear(4, 1), config=CONFIG)[0]
    for folder in folders[1:]:
        monkeypatch.chdir(folder)
        step(engine)
        engine.save_checkpoint("runs")
        engine.wait_for_checkpoint()
    step(engine)
    engine.destroy()
    tags = [(folder / "runs" / "latest").read_text().strip() for folder in folders[1:]]
    assert tags == ["global_step1", "global_step2"]
    assert {path.name for path in folders[0].iterdir()} >= {"run", "csv", "trace", "flops.txt"}
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders[1:]] == [["runs"], ["runs"]]


def test_retention_deletes_in_the_folder_that_was_named(tmp_path, monkeypatch):
    mine, others = tmp_path / "mine", tmp_path / "others"
    for folder in (mine, others):
        folder.mkdir()
    config = {key: CONFIG[key] for key in ("train_batch_size", "optimizer")}
    for folder, keep in ((others, None), (mine, 1)):
        monkeypatch.chdir(folder)
        retention = {} if keep is None else {"checkpoint": {"keep_last": keep}}
        engine = polyaccel.initialize(model=torch.nn.Linear(4, 1), config=config | retention)[0]
        for _ in range(3):
            step(engine)
            engine.save_checkpoint("runs")
            monkeypatch.chdir(others)
            engine.wait_for_checkpoint()
            monkeypatch.chdir(folder)
        engine.destroy()
    assert len([each for each in (others / "runs").iterdir() if each.is_dir()]) == 3
    assert len([each for each in (mine / "runs").iterdir() if each.is_dir()]) == 1
