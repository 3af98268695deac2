"""`polyaccel plugins new`: a distribution to begin a plugin with. It installs, works, and passes its check as it is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from types import MappingProxyType

from polyaccel.errors import PluginContractError
from polyaccel.registry import PluginGroup

KINDS: Mapping[str, tuple[PluginGroup, str]] = MappingProxyType(
    {
        "accelerator": (PluginGroup.ACCELERATORS, "Use it with `DS_ACCELERATOR=$name python train.py`.\n"),
        "comm": (PluginGroup.COMM, "Use it with `POLYACCEL_COMM=$name`, or `comm.backend` in the config.\n"),
        "launcher": (PluginGroup.LAUNCHERS, "Use it with `polyaccel run --launcher $name --nproc 2 train.py`.\n"),
        "monitor": (PluginGroup.MONITORS, ""),
        "storage": (PluginGroup.STORAGE, ""),
    }
)
"""What can be begun: its entry-point group, and how one that is installed is used."""

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_TEMPLATES = files("polyaccel.cli.plugins") / "scaffold"


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "write a package to begin a plugin with"
    parser = actions.add_parser("new", help=summary, description=summary)
    parser.add_argument("name", metavar="NAME", help="what configs will call it, such as `acme`")
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    parser.add_argument("--folder", type=Path, help="where to write it (default: polyaccel-NAME)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the package and say what to do next."""
    folder = args.folder or Path(f"polyaccel-{args.name}")
    written = write(args.name, args.kind, folder)
    print("\n".join(str(file) for file in written))
    print(f"\npip install -e {folder} && polyaccel plugins check {_check(args.name, args.kind)}")
    return 0


def write(name: str, kind: str, folder: Path) -> list[Path]:
    """The files of a new plugin, written below `folder`. Raises PluginContractError for a name that no package can have
    and for a folder that is not empty."""
    if not _NAME.fullmatch(name):
        raise PluginContractError(
            f"{name!r} cannot be a plugin's name", cure="use lower-case letters, digits, and - or _ between", value=name
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PluginContractError(f"{folder} is not empty", cure="choose another one: --folder", value=str(folder))
    group, use = KINDS[kind]
    module = f"polyaccel_{name.replace('-', '_')}"
    camel = "".join(word.capitalize() for word in re.split("[-_]", name))
    values = {
        "name": name,
        "kind": kind,
        "package": f"polyaccel-{name}",
        "module": module,
        "group": group.value,
        "cls": f"{camel}{'Backend' if kind == 'comm' else kind.capitalize()}",
        "communicator": f"{camel}Communicator",
        "check": _check(name, kind),
        "use": Template(use).substitute(name=name),
    }
    contents = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{module}/__init__.py": "__init__.py",
        f"{module}/{kind}.py": f"{kind}.py",
        f"tests/test_{name.replace('-', '_')}.py": f"test_{kind}.py",
    }
    files_written = []
    for path, template in contents.items():
        text = (_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(text).substitute(values), encoding="utf-8")
        files_written.append(file)
    return files_written


def _check(name: str, kind: str) -> str:
    """The arguments after `polyaccel plugins check`."""
    return f"{name} --kind {kind}"
