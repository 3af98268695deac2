"""No plan, manifest or error of `polyaccel run` prints the job's secret or one of the user's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

import pytest

from polyaccel.cli import run as verb
from polyaccel.cli.main import main
from polyaccel.cli.run import shown_plan
from polyaccel.launch.base import Job, Launcher, LaunchPlan, RankSpec
from polyaccel.launch.commands.mpi import HydraLauncher, IntelMpiLauncher, MvapichLauncher, OpenMpiLauncher
from polyaccel.launch.commands.slurm import SlurmLauncher
from polyaccel.launch.local import LocalLauncher
from polyaccel.launch.remote.pdsh import PdshLauncher
from polyaccel.launch.remote.ssh import SshLauncher
from polyaccel.redaction import HIDDEN

OURS, USERS = "a-secret-of-this-very-job", "hunter2-hunter2"


class TellingLauncher(LocalLauncher):
    """One whose plan holds the whole job, in a word and in a variable."""

    name: ClassVar[str] = "telling"

    def plan(self, job: Job) -> LaunchPlan:
        rank = RankSpec(0, 0, ("start", job.to_json(), f"--with={job.secret}"), {**os.environ, "ALL": job.to_json()})
        return LaunchPlan(job.job_id, (rank,), "a", 1)


LAUNCHERS: list[type[Launcher]] = [
    *(LocalLauncher, SshLauncher, PdshLauncher, OpenMpiLauncher, HydraLauncher, IntelMpiLauncher, MvapichLauncher),
    *(SlurmLauncher, TellingLauncher),
]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_no_plan_shows_a_secret(
    launcher: type[Launcher], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYACCEL_JOB_SECRET", OURS)
    monkeypatch.setattr(verb, "choose_launcher", lambda name: launcher())
    script = tmp_path / "train.py"
    script.touch()
    where = ["--nproc", "1"] if issubclass(launcher, LocalLauncher) else ["--hosts", "a:1,b:1"]
    given = ["--export", f"HF_TOKEN={USERS}", "--export", "NCCL_DEBUG=INFO"]
    assert main(["run", "--dry-run", *where, *given, str(script), "--api-key", USERS]) == 0
    shown = "".join(capsys.readouterr())
    assert OURS not in shown
    assert USERS not in shown
    assert "polyaccel" in shown or "train.py" in shown


def test_a_plan_shows_what_it_hides() -> None:
    job = Job(command=("train",), hosts={"a": (0,)}, exports={"HF_TOKEN": USERS, "A": "1"})
    lines = shown_plan(OpenMpiLauncher().plan(job), {}, job.secret)
    assert job.secret not in lines
    assert f"HF_TOKEN='{HIDDEN}'" in lines
    assert "A=1 " in lines


@pytest.mark.parametrize("kind", ["k8s-jobset", "k8s-trainjob", "k8s-mpijob"])
def test_a_manifest_takes_secrets_from_the_cluster(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = pytest.importorskip("yaml")
    monkeypatch.setenv("HF_TOKEN", USERS)
    script = tmp_path / "train.py"
    script.touch()
    options = ["--image", "i", "--nproc", "1", "--name", "gpt", "--export", "HF_TOKEN", "--export", "A=1"]
    assert main(["run", "--emit", kind, *options, str(script)]) == 0
    out, hint = capsys.readouterr()
    assert USERS not in out + hint
    assert "secret generic gpt" in hint
    text = json.dumps(yaml.safe_load(out))
    assert json.dumps({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "gpt", "key": "HF_TOKEN"}}}) in text
    assert json.dumps({"name": "A", "value": "1"}) in text


def test_config_check_shows_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": 1, "comet": {"enabled": False, "api_key": USERS}}))
    assert main(["config", "check", str(file)]) == 0
    assert USERS not in "".join(capsys.readouterr())
    file.write_text(json.dumps({"train_batch_size": 1, "comet": {"enabled": 3, "api_key": USERS, "api_token": USERS}}))
    assert main(["config", "check", str(file)]) == 1
    assert USERS not in "".join(capsys.readouterr())
