"""What the repository's host reads: the workflow, the forms and the container name commands and targets that exist."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyaccel.cli.main import full_parser

ROOT = Path(__file__).parents[2]
HOST = ROOT / ".github"
FORMS = sorted(file for file in (HOST / "ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))
CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
DOCUMENTS = ("SECURITY.md", "CODE_OF_CONDUCT.md")
TEXTS = {
    file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
    for file in [
        *HOST.rglob("*.*"),
        *(ROOT / ".devcontainer").iterdir(),
        ROOT / "SECURITY.md",
        ROOT / "CODE_OF_CONDUCT.md",
    ]
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.MULTILINE))
FIELDS = {"textarea", "input", "dropdown", "checkboxes"}


def parsed(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_runs_what_is_there(file: Path) -> None:
    workflow = parsed(file)
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML 1.1 reads `on` as a boolean
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    scripts = [word for step in steps for word in shlex.split(step.get("run", "")) if word.startswith((".", "/"))]
    assert ".ci/run" in scripts
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.name)
def test_a_form_has_what_the_host_asks_of_it(file: Path) -> None:
    form = parsed(file)
    assert {"name", "description", "body"} <= set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} <= FIELDS
    assert all(part["attributes"]["label"] for part in fields)
    names = [part["id"] for part in fields]
    assert len(names) == len(set(names))
    assert any(part["validations"]["required"] for part in fields if "validations" in part)


def test_the_form_for_bugs_asks_for_the_report_of_the_doctor() -> None:
    (doctor,) = (part for part in parsed(HOST / "ISSUE_TEMPLATE" / "bug.yml")["body"] if part.get("id") == "doctor")
    assert "polyaccel doctor --json" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]


def test_every_target_of_make_that_they_name_exists() -> None:
    named = {target for text in TEXTS.values() for target in re.findall(r"`?\bmake ([a-z][a-z-]*)", text)}
    assert {"lint", "test", "environment"} <= named <= TARGETS


def test_every_command_of_ours_that_they_name_is_one() -> None:
    quoted = {words for text in TEXTS.values() for words in re.findall(r"`(polyaccel [^`]+)`", text)}
    placeholders = [
        part["attributes"]["placeholder"]
        for form in FORMS
        for part in parsed(form)["body"]
        if "placeholder" in part["attributes"]
    ]
    for command in {*quoted, *placeholders}:
        program, *arguments = shlex.split(command)
        assert program == "polyaccel"
        full_parser().parse_args(arguments)


def test_every_file_that_they_name_exists() -> None:
    for name in DOCUMENTS:
        links = re.findall(r"\]\(([^)#]+)\)", TEXTS[name])
        assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
    quoted = {name for text in TEXTS.values() for name in re.findall(r"`([\w./-]+\.(?:md|toml|lock))`", text)}
    assert [name for name in quoted if not (ROOT / name).exists()] == []


def test_the_container_uses_the_environment_that_make_makes() -> None:
    interpreter = CONTAINER["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    (default,) = re.findall(r"^VENV \?= (.+)$", MAKEFILE, re.MULTILINE)
    assert interpreter == f"${{workspaceFolder}}/{default}/bin/python"
    assert "make environment" in CONTAINER["postCreateCommand"]
