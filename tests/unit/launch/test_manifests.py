"""`polyaccel run --emit`: the commands in a manifest make the job that was asked for, and YAML reads back as it was."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from manifest_commands import expanded, pod_commands

from polyaccel.cli.job import job_of
from polyaccel.cli.main import main
from polyaccel.cli.options import add_options
from polyaccel.launch.base import Job
from polyaccel.launch.manifests import as_yaml

NAMES = st.text(min_size=1, max_size=9)
VALUES = st.recursive(
    st.text(max_size=12) | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
HOW = ["--num-nodes", "3", "--nproc", "4", "--image", "registry/image:1"]


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=4))
def test_yaml_reads_back_as_it_was(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(as_yaml(tree)) == tree


@pytest.mark.parametrize(
    "word", ["yes", "No", "null", "~", "1e3", "0x1f", "1:30", "2026-11-23", "a: b", "- a", "#", ""]
)
def test_a_word_that_yaml_would_misread_is_quoted(word: str) -> None:
    assert yaml.safe_load(as_yaml({"word": word, "words": [word]})) == {"word": word, "words": [word]}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return "train.py"


def _emitted(capsys: pytest.CaptureFixture[str], kind: str, *options: str) -> dict[str, Any]:
    assert main(["run", "--emit", kind, *HOW, *options]) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return found


def _job(words: list[str], *more: str) -> Job:
    """What `polyaccel run` would start."""
    assert words[:2] == ["polyaccel", "run"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return job_of(parser.parse_args([*more, *words[2:]]), {}, lambda: 1)


OPTIONS = st.lists(
    st.sampled_from(
        [
            "--bind-cores",
            "--bind-core-list=0-2,7",
            "--grace-period=2.5",
            "--stop-timeout=0",
            "--hang-timeout=600",
            "--log-dir=logs of ranks",
            "--venv-script=$HOME/venv",
            "--module",
            "--no-python",
            "--master-port=3000",
        ]
    ),
    unique=True,
).filter(lambda options: not {"--module", "--no-python"} <= set(options))


@given(OPTIONS, st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9), max_size=4))
def test_every_pod_makes_the_job_that_was_asked_for(options: list[str], arguments: list[str]) -> None:
    target = ["os", *arguments] if "--module" in options else [__file__, *arguments]
    parser = argparse.ArgumentParser()
    add_options(parser)
    from polyaccel.cli.emit import add_emit_options, manifest

    add_emit_options(parser)
    parts = ["--emit", "k8s", "--name", "a", *HOW, *options, *target]
    made = yaml.safe_load(manifest(parser.parse_args(parts), {}))
    hosts = ",".join(f"a-node-0-{number}.a:4" for number in range(3))
    for number, (shell, flag, program, zero, *words) in enumerate(pod_commands(made, {})):
        assert (shell, flag, zero) == ("sh", "-c", "sh")
        assert '--node-rank "$JOB_COMPLETION_INDEX"' in program
        where = ["--hosts", hosts, "--node-rank", str(number), "--master-addr", "a-node-0-0.a"]
        asked = _job(["polyaccel", "run", *options, *target], *where)
        found = _job(words, "--node-rank", str(number))
        assert found == replace(asked, job_id=found.job_id)


def test_only_what_is_exported_goes_into_a_manifest(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("WANDB_API_KEY", "another")
    for kind in ("k8s-jobset", "k8s-trainjob", "k8s-mpijob"):
        assert main(["run", "--emit", kind, *HOW, "--export", "A=it's $(B) $$", script]) == 0
        text = capsys.readouterr().out
        assert "secret" not in text
        assert "another" not in text
        (line,) = {line.strip() for line in text.splitlines() if "it's" in line}
        assert expanded(yaml.safe_load(line)["value"], {"B": "wrong"}) == "it's $(B) $$"


def test_an_mpi_job_starts_the_ranks_by_its_operators_hostfile(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = _emitted(capsys, "k8s-mpijob", "--name", "gpt", "--resource", "example.com/device", script, "--steps", "5")
    spec = made["spec"]
    assert spec["slotsPerWorker"] == 4
    replicas = spec["mpiReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Launcher": 1, "Worker": 3}
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    wanted = "polyaccel run --launcher openmpi --hostfile /etc/mpi/hostfile train.py --steps 5"
    assert launcher["command"] == shlex.split(wanted)
    assert "resources" not in launcher
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert worker["resources"] == {"limits": {"example.com/device": "4"}}
    assert "command" not in worker


def test_pods_get_what_was_asked_for(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--restarts", "2", "--workdir", "/app", "--resource", "memory=64Gi", "--resource", "example.com/device")
    spec = _emitted(capsys, "k8s", *how, script)["spec"]
    assert spec["failurePolicy"] == {"maxRestarts": 2}
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"memory": "64Gi", "example.com/device": "4"}}
    assert (container["workingDir"], container["image"]) == ("/app", "registry/image:1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nproc", "2"], "--emit k8s, and no --image"),
        (["--image", "a"], "--emit k8s, and no --ranks"),
        (["--image", "a", "--nproc", "2", "--hosts", "b"], "--emit k8s and --hosts cannot be given together"),
        (["--image", "a", "--nproc", "2", "--elastic", "1"], "--emit k8s and --elastic cannot be given together"),
        (["--image", "a", "--nproc", "2", "--name", "A_b"], "'A_b' is not a name for a job of Kubernetes"),
        (["--image", "a", "--nproc", "2", "--resource", "=2"], "--resource '=2' names none"),
    ],
)
def test_what_cannot_be_emitted_is_one_sentence_and_a_cure(
    options: list[str], said: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--emit", "k8s", *options, script]) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    assert "hint: " in shown.err
    assert shown.out == ""


def test_a_train_job_has_no_folder(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--emit", "k8s-trainjob", *HOW, "--workdir", "/app", script]) == 1
    assert "or emit k8s-jobset" in capsys.readouterr().err
