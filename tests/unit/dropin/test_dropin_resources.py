"""Hosts, slots and cores by the functions of DeepSpeed's launcher."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from deepspeed.launcher import runner
from deepspeed.launcher.runner import main
from deepspeed.utils.numa import parse_range_list

HOSTS = {"one": [0, 1, 2, 3], "two": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("two:0,3", "", {"two": [0, 3]}),
        ("two:1,1@one@two:0", "", {"one": [0, 1, 2, 3], "two": [0, 1]}),
        ("", "one:0,1@two:3", {"one": [2, 3], "two": [0, 1, 2]}),
        ("", "two", {"one": [0, 1, 2, 3]}),
        ("", "one@two:0,1,2,3", {}),
    ],
)
def test_hosts_and_slots_are_chosen(include: str, exclude: str, left: dict[str, list[int]]) -> None:
    assert runner.parse_resource_filter(HOSTS, include, exclude) == left
    assert runner.parse_inclusion_exclusion({"one": 4, "two": 4}, include, exclude) == left
    assert list(runner.parse_resource_filter(HOSTS, include, exclude)) == list(left)


@pytest.mark.parametrize(
    ("include", "exclude"),
    [("one", "two"), ("three", ""), ("", "three"), ("two:4", ""), ("", "two@one:1@5"), ("two:", "")],
)
def test_what_is_not_there_is_refused(include: str, exclude: str) -> None:
    with pytest.raises(ValueError):
        runner.parse_resource_filter(HOSTS, include, exclude)


def test_a_hostfile_is_read(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    assert runner.fetch_hostfile(file) is None
    file.write_text("\n one slots=2\n# a comment\n123.23.12.10   slots=4\n")
    assert runner.fetch_hostfile(file) == {"one": 2, "123.23.12.10": 4}
    for text in ("one slots=1\none slots=2", "this is bad slots=1", "missing", " \n"):
        file.write_text(text)
        with pytest.raises(ValueError):
            runner.fetch_hostfile(file)


def test_the_first_hosts_and_slots_are_taken() -> None:
    assert runner.apply_num_nodes_and_gpus(HOSTS, 1, 2) == {"one": [0, 1]}
    assert runner.apply_num_nodes_and_gpus(HOSTS, -1, -1) == HOSTS
    assert json.loads(base64.urlsafe_b64decode(runner.encode_world_info(HOSTS))) == HOSTS


def test_ranges_of_cores_go_up() -> None:
    assert parse_range_list("0,2-4,6,8-9") == [0, 2, 3, 4, 6, 8, 9]
    for text in ("0,2-6,5-9", "8,2-6", "1,6-2", "", "1-", "a"):
        with pytest.raises(ValueError):
            parse_range_list(text)


@pytest.mark.parametrize(
    "words",
    [
        "--num_nodes 1 -i localhost x.py",
        "--num_gpus 1 -e localhost x.py",
        "--num_nodes 2 x.py",
        "-H {hosts} -i c x.py",
        "-H {hosts} -i a:3 x.py",
        "-H {hosts} -i a -e b x.py",
        "-H {wrong} x.py",
    ],
)
def test_the_launchers_main_raises_value_errors(words: str, tmp_path: Path) -> None:
    hosts, wrong = tmp_path / "hosts", tmp_path / "wrong"
    hosts.write_text("a slots=2\nb slots=2\n")
    wrong.write_text("a 2\n")
    with pytest.raises(ValueError) as caught:
        main(words.format(hosts=hosts, wrong=wrong).split())
    assert caught.value.value  # type: ignore[attr-defined]
