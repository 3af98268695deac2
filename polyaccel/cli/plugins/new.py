"""`polyaccel plugins new`: a distribution to begin plugins with. It installs, works, and passes its check as it is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from types import MappingProxyType

from polyaccel.errors import PluginConflict, PluginContractError
from polyaccel.registry import PluginGroup, list_plugins

KINDS: Mapping[str, tuple[PluginGroup, str]] = MappingProxyType(
    {
        "accelerator": (PluginGroup.ACCELERATORS, "`DS_ACCELERATOR=$name python train.py`"),
        "comm": (PluginGroup.COMM, "`POLYACCEL_COMM=$name`, or `comm.backend` in the config"),
        "launcher": (PluginGroup.LAUNCHERS, "`polyaccel run --launcher $name --ranks 2 train.py`"),
        "monitor": (PluginGroup.MONITORS, "`monitors` in the config"),
        "storage": (PluginGroup.STORAGE, "`checkpoint.storage` in the config"),
    }
)
"""What can be begun: its entry-point group, and how one that is installed is used."""

FRAMEWORKS = ("torch", "jax")
"""The new accelerator's memory: the first is one that torch supports and JAX can read."""
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_TEMPLATES = files("polyaccel.cli.plugins") / "scaffold"
_OURS = __name__.partition(".")[0]


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "write a package to begin one or several plugins of one name with"
    parser = actions.add_parser("new", help=summary, description=summary)
    parser.add_argument("name", metavar="NAME", help="its name in configs, for example `acme`")
    parser.add_argument(
        "--kind", choices=sorted(KINDS), action="append", required=True, help="give it again for several in one package"
    )
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, default="torch", help="the framework of the accelerator's memory"
    )
    parser.add_argument("--folder", type=Path, help="where to write it (default: the package's name)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the package and print what to do next."""
    kinds = sorted(set(args.kind))
    folder = args.folder or Path(package_of(args.name, kinds))
    written = write(args.name, kinds, folder, framework=args.framework)
    print("\n".join(str(file) for file in written))
    checks = "".join(f" && polyaccel plugins check {check}" for check in _checks(args.name, kinds))
    print(f"\npip install -e {folder}{checks}")
    return 0


def package_of(name: str, kinds: Sequence[str]) -> str:
    """Return the distribution for these kinds of plugins called `name`."""
    return "-".join([_OURS, name, *(() if "accelerator" in kinds else kinds)])


def write(name: str, kinds: Sequence[str], folder: Path, *, framework: str = "torch") -> list[Path]:
    """Write the files of new plugins called `name` below `folder`."""
    if not _NAME.fullmatch(name):
        raise PluginContractError(
            f"{name!r} cannot be a plugin's name", hint="use lower-case letters, digits, and - or _ between", value=name
        )
    for group in PluginGroup:
        for info in list_plugins(group):
            if info.name == name and info.package == _OURS:
                raise PluginConflict(
                    f"{name!r} is the name of the {group.noun} {info.value}",
                    hint="choose another name: two plugins of one kind and name are an error when they are used",
                    value=name,
                )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PluginContractError(f"{folder} is not empty", hint="choose another one: --folder", value=str(folder))
    package = package_of(name, kinds)
    camel = "".join(word.capitalize() for word in re.split("[-_]", name))
    values = {
        "name": name,
        "nouns": " and ".join(KINDS[kind][0].noun for kind in kinds),
        "package": package,
        "module": package.replace("-", "_"),
        "communicator": f"{camel}Communicator",
        "default_comm": name if "comm" in kinds else "gloo",
    }
    classes = {kind: f"{camel}{'Backend' if kind == 'comm' else kind.capitalize()}" for kind in kinds}
    values["entry_points"] = "\n".join(
        f'[project.entry-points."{KINDS[kind][0].value}"]\n{name} = "{values["module"]}.{kind}:{classes[kind]}"\n'
        for kind in kinds
    )
    values["checks"] = "\n".join(f"    polyaccel plugins check {check}" for check in _checks(name, kinds))
    values["uses"] = "\n".join(
        f"- `{values['module']}/{kind}.py`, the {KINDS[kind][0].noun}: {Template(KINDS[kind][1]).substitute(name=name)}"
        for kind in kinds
    )
    written = []
    for path, template, cls in _contents(name.replace("-", "_"), values["module"], classes, framework):
        text = (_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(text).substitute(values, cls=cls), encoding="utf-8")
        written.append(file)
    return written


def _contents(word: str, module: str, classes: Mapping[str, str], framework: str) -> Iterator[tuple[str, str, str]]:
    """Of each file its path, its template, and the class that it has. `word` is the plugins' name in file names."""
    yield "pyproject.toml", "pyproject.toml", ""
    yield "README.md", "README.md", ""
    yield f"{module}/__init__.py", "__init__.py", ""
    for kind, cls in classes.items():
        template = "accelerator_jax.py" if kind == "accelerator" and framework == "jax" else f"{kind}.py"
        yield f"{module}/{kind}.py", template, cls
        yield f"tests/test_{word}_{kind}.py", f"test_{kind}.py", cls


def _checks(name: str, kinds: Sequence[str]) -> Iterator[str]:
    """The arguments after `polyaccel plugins check`, for each kind."""
    return (f"{name} --kind {kind}" for kind in kinds)
