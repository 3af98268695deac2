"""Options of `polyaccel run` beside hosts and ranks: elastic sizes, debuggers, the launcher's process id."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyaccel.cli.elastic import check_size, elastic_sizes
from polyaccel.cli.job import job_of
from polyaccel.cli.main import main
from polyaccel.cli.options import DEBUG_PORT, add_options
from polyaccel.cli.parser import JobParser
from polyaccel.cli.run import pid_file
from polyaccel.errors import ConfigError, LaunchError
from polyaccel.launch import program
from polyaccel.launch.plan import plan_host
from polyaccel.launch.program import how_to_attach


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("localhost slots=1\nfar slots=2\n")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _args(*words: str) -> argparse.Namespace:
    parser = JobParser(allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "port", "arguments"),
    [
        (["train.py", "--debugpy"], None, ["--debugpy"]),
        (["--debugpy", "train.py", "7000"], DEBUG_PORT, ["7000"]),
        (["--debugpy", "7000", "train.py"], 7000, []),
        (["--debugpy=7000", "train.py"], 7000, []),
        (["--grace-period", "3", "--debugpy", "--wait", "train.py", "--debugpy", "9"], DEBUG_PORT, ["--debugpy", "9"]),
        (["--module", "--debugpy", "--nproc", "2", "train.py"], DEBUG_PORT, []),
    ],
)
def test_a_debuggers_port_may_be_left_out(words: list[str], port: int | None, arguments: list[str]) -> None:
    args = _args(*words)
    assert (args.debugpy, args.script, args.arguments) == (port, "train.py", arguments)


@pytest.mark.parametrize("words", [["--debugpy=x", "train.py"], ["--debugpy", "70000", "train.py"], ["--debugpy"]])
def test_a_port_that_is_none_is_refused_or_is_the_script(words: list[str]) -> None:
    if words[-1] == "train.py" and "=" not in words[0]:
        assert _args(*words).script == "70000"
    else:
        with pytest.raises(SystemExit):
            _args(*words)


def test_each_rank_listens_on_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_has_module", lambda name: True)
    job = job_of(_args("--nproc", "2", "--debugpy", "7000", "--wait", "train.py", "x"), {}, lambda: 1)
    commands = [spec.command for spec in plan_host(job, 0, {}).ranks]
    listens = [command[command.index("--listen") + 1] for command in commands]
    assert listens == ["127.0.0.1:7000", "127.0.0.1:7001"]
    assert all(command[-3:] == ("--wait-for-client", "train.py", "x") for command in commands)
    assert how_to_attach(job)[1] == "rank 1 listens for a debugger, and waits for it: attach to 127.0.0.1:7001"


def test_how_to_reach_ranks_on_other_hosts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_has_module", lambda name: True)
    options = ("--hostfile", "hosts", "--debugpy", "7000", "train.py")
    job = job_of(_args(*options), {}, lambda: 1)
    here, *far = how_to_attach(job)
    assert here == "rank 0 listens for a debugger: attach to 127.0.0.1:7000"
    assert far[1].endswith("attach to 127.0.0.1:7002, after `ssh -N -L 7002:127.0.0.1:7002 far`")
    on_its_own = job_of(_args("--node-rank", "1", *options), {}, lambda: 1)
    assert [sentence.partition(" ")[2][:2] for sentence in how_to_attach(on_its_own)] == ["1 ", "2 "]
    assert how_to_attach(job_of(_args("train.py"), {}, lambda: 1)) == []


@pytest.mark.parametrize(
    ("words", "is_installed", "named"),
    [
        (["--debugpy", "train.py"], False, "--debugpy"),
        (["--no-python", "--debugpy", "true"], True, "--no-python"),
        (["--wait", "train.py"], True, "--wait"),
    ],
)
def test_a_debugger_that_cannot_be_had_is_one_sentence_and_a_cure(
    words: list[str], is_installed: bool, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_has_module", lambda name: is_installed)
    with pytest.raises(LaunchError) as caught:
        job_of(_args(*words), {}, lambda: 1)
    assert named in str(caught.value)
    assert caught.value.hint


def test_the_launchers_process_id_is_kept_in_a_file_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / f"{os.getpid()}.polyaccel"
    file.write_text("of an earlier one")
    with pid_file(".polyaccel"):
        assert file.read_text() == f"{os.getpid()}\n"
        assert str(file) in capsys.readouterr().err
    assert not file.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(LaunchError) as caught, pid_file(".polyaccel"):
        pass
    assert caught.value.value == str(tmp_path / "absent" / f"{os.getpid()}.polyaccel")


SECTION = {"elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3]}}


@pytest.mark.parametrize(
    "words",
    [
        ["--elastic-config", "ds.json", "train.py"],
        ["train.py", "--deepspeed_config", "ds.json"],
        ["train.py", "--lr", "1", "--deepspeed_config=ds.json"],
    ],
)
def test_the_numbers_of_ranks_come_from_the_config(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(SECTION))
    sizes = elastic_sizes(_args(*words))
    assert sizes == (1, 2, 3, 4, 6)
    check_size(4, sizes)
    with pytest.raises(LaunchError) as caught:
        check_size(5, sizes)
    assert caught.value.value == 5
    assert caught.value.hint == "start one of 1, 2, 3, 4, 6"


def test_without_a_section_any_number_of_ranks_will_do(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4}')
    assert elastic_sizes(_args("train.py", "--deepspeed_config", "ds.json")) is None
    assert elastic_sizes(_args("train.py", "--deepspeed_config")) is None
    check_size(5, None)
    with pytest.raises(ConfigError) as caught:
        elastic_sizes(_args("--elastic-config", "ds.json", "train.py"))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("elasticity.enabled", False)]


def test_a_config_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        elastic_sizes(SimpleNamespace(elastic_config=Path("absent.json"), arguments=[]))  # type: ignore[arg-type]
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("config", "absent.json")]


def test_an_option_of_the_tuner_behind_the_config_is_refused_with_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", "ds.json", "--trials", "2", "train.py"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "usage: polyaccel tune [options] CONFIG [options of polyaccel run] script.py" in said
    assert "unrecognized argument: --trials" in said
