"""A storage, a monitor and tiers of a package that polyaccel has never heard of, opened by config keys and used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from throwaway import Distribution, install, python

SOURCE = '''
"""A storage that stamps its files, a monitor that keeps losses, and a tier that counts what it lends."""

import json
from pathlib import Path

from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.observability.metrics import Monitor
from polyaccel.errors import ConfigError, Problem
from polyaccel.offload.host import HostTier


class Vault(FileStorage):
    API_VERSION = (2, 0)
    name = "vault"
    written = []

    @classmethod
    def check_options(cls, options):
        wrong = [Problem(f"vault.{key}", value, "is no option") for key, value in options.items() if key != "shelf"]
        if wrong:
            raise ConfigError(wrong)
        return options.get("shelf", "bottom")

    def write(self, path, chunks):
        self.written.append((self.options, path))
        super().write(path, chunks)


class Losses(Monitor):
    API_VERSION = (2, 0)
    name = "losses"

    def open(self, directory, options):
        self.file = Path(directory, options["file"])
        self.lines = []

    def write(self, metrics):
        self.lines.append(metrics.loss)
        if len(self.lines) == 3:
            raise RuntimeError("the disk is full")

    def write_events(self, events):
        pass

    def close(self):
        self.file.write_text(json.dumps(self.lines))


class Attic(HostTier):
    API_VERSION = (2, 0)
    name = "attic"
    opened = []
    lent = 0

    def open(self, accelerator, host, options):
        self.opened.append(dict(options.own))
        super().open(accelerator, host, options)

    def stream_groups(self, groups):
        for group in super().stream_groups(groups):
            Attic.lent += len(group)
            yield group
'''
PACKAGE = Distribution(
    "curio",
    "1.0",
    SOURCE,
    {
        "polyaccel.storage": {"vault": "curio:Vault"},
        "polyaccel.monitors": {"losses": "curio:Losses"},
        "polyaccel.tiers": {"attic": "curio:Attic"},
    },
)
TRAIN = """
import json, sys
import torch
import polyaccel

torch.manual_seed(0)
folder, doors = {folder!r}, {doors}
config = {{
    "train_batch_size": 2,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
    "zero_optimization": {{"stage": 3, "stage3_param_persistence_threshold": 0}} | ({{
        "offload_optimizer": {{"device": "attic", "tier_options": {{"height": 3}}}},
        "offload_param": {{"device": "attic"}},
    }} if doors else {{}}),
}} | ({{
    "checkpoint": {{"storage": {{"vault": {{"shelf": "top"}}}}, "async": False}},  # what it wrote is asked for here
    "monitors": {{"losses": {{"file": "losses.json"}}, "jsonl": {{}}}},
    "run_dir": folder,
}} if doors else {{}})
model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Linear(300, 2))
engine, *_ = polyaccel.initialize(model=model, config=config)
losses = []
for step in range(4):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    losses.append(engine.metrics.loss)
    if step == 1:
        engine.save_checkpoint(folder + "/saved")
if doors:
    import curio
    path, _ = engine.load_checkpoint(folder + "/saved")
    assert engine.global_steps == 2, path
engine.destroy()
shown = {{"losses": losses}}
if doors:
    shown |= {{"written": curio.Vault.written, "opened": curio.Attic.opened, "lent": curio.Attic.lent}}
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("curio") / "site"
    install(site, PACKAGE)
    return site


def test_each_door_opens_a_plugin_that_is_really_used(site: Path, tmp_path: Path) -> None:
    plain = json.loads(python(TRAIN.format(folder=str(tmp_path), doors=False), site, cache=tmp_path).stdout)
    folder = tmp_path / "run"
    done = python(TRAIN.format(folder=str(folder), doors=True), site, cache=tmp_path)
    shown = json.loads(done.stdout)
    assert shown["losses"] == plain["losses"]

    assert {shelf for shelf, _ in shown["written"]} == {"top"}
    assert any(path.endswith("latest") or "latest" in path for _, path in shown["written"])
    assert (folder / "saved").is_dir()

    assert json.loads((folder / "losses.json").read_text()) == shown["losses"][:3]
    assert done.stderr.count("monitor losses failed and is dropped: the disk is full") == 1
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == shown["losses"]

    assert shown["opened"] == [{"height": 3}, {}]  # states, then parameters
    assert shown["lent"] > 0


def test_what_no_plugin_answers_to_is_an_error_with_the_key(site: Path, tmp_path: Path) -> None:
    wrong = [
        {"checkpoint": {"storage": "volt"}},
        {"checkpoint": {"storage": {"vault": {"shelv": 1}}}},
        {"monitors": {"lossses": {}}},
        {"monitors": {"jsonl": {"indent": 2}}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "atic"}}},
    ]
    code = f"""
import torch, polyaccel
for section in {wrong!r}:
    config = {{"train_batch_size": 2, "optimizer": {{"type": "AdamW"}}}} | section
    try:
        polyaccel.initialize(model=torch.nn.Linear(4, 2), config=config)
    except polyaccel.ConfigError as error:
        print(error)
"""
    said = python(code, site, cache=tmp_path).stdout
    assert said.count("1 problem\n") == len(wrong)
    for told in (
        "checkpoint.storage = \"volt\": no storage plugin is called 'volt'; installed: file (polyaccel",
        "checkpoint.storage.vault.shelv = 1: is no option",
        "monitors.lossses = \"lossses\": no monitor plugin is called 'lossses'; installed: comet (polyaccel",
        "monitors.jsonl.indent = 2: has no such option",
        'zero_optimization.offload_optimizer.device = "atic": no tier plugin is called',
    ):
        assert told in said
