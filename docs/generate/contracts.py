"""The contracts of plugins as Markdown, from the modules' own docstrings.

`python docs/generate/contracts.py` renews docs/reference/contracts.md and docs/torch_device.md, each between its two
markers, so that they can be read in the repository too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from google_docstring import Docstring, split

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- made by docs/generate/contracts.py: begin -->", "<!-- made by docs/generate/contracts.py: end -->"
SECTIONS = {
    "Accelerator": (
        *("polyaccel.accelerators.base", "polyaccel.accelerators.torch_device", "polyaccel.accelerators.jax_device"),
        *("polyaccel.accelerators.device_probe", "polyaccel.accelerators.memory.host"),
        *("polyaccel.accelerators.memory.torch", "polyaccel.accelerators.memory.numpy"),
    ),
    "Comm backend": (
        *("polyaccel.comm.base", "polyaccel.comm.composed", "polyaccel.comm.objects"),
        *("polyaccel.comm.collective", "polyaccel.comm.work", "polyaccel.comm.arguments"),
        *("polyaccel.comm.rendezvous.ranks", "polyaccel.comm.rendezvous.sockets"),
        *(
            "polyaccel.comm.collectives.p2p",
            "polyaccel.comm.collectives.reduction",
            "polyaccel.comm.collectives.scratch",
        ),
        *("polyaccel.comm.collectives.single", "polyaccel.comm.backends.torch.backend"),
    ),
    "Tier": ("polyaccel.offload.tier",),
    "Storage": ("polyaccel.checkpoint.storage.base", "polyaccel.checkpoint.storage.file"),
    "Launcher": ("polyaccel.launch.base", "polyaccel.launch.plan"),
    "Monitor": ("polyaccel.observability.metrics",),
    "Buffers and element types": ("polyaccel.core.buffer", "polyaccel.core.types"),
    "Kernels": (
        *("polyaccel.ops.base", "polyaccel.ops.optimizers"),
        *("polyaccel.ops.numpy", "polyaccel.ops.torch.kernels"),
    ),
    "Errors": ("polyaccel.errors",),
}
"""The modules of each section, in its order."""


def contracts() -> str:
    """Every section, with all public names of its modules."""
    lines = []
    for title, modules in SECTIONS.items():
        lines += [f"## {title}", ""]
        for module in modules:
            lines += _module(module)
    return "\n".join(lines).rstrip()


def needs() -> str:
    """The list of what torch must know of a device, as a table."""
    from polyaccel.testkit.accelerator.torch_needs import NEEDS  # imports torch

    lines = ["| what | what for | without it |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {need.name} | {need.used_for} | {need.without} |" for need in NEEDS)])


def with_part(document: str, part: str) -> str:
    """`document` with `part` between the markers. Raises ValueError where one is missing."""
    head, rest = document[: document.index(BEGIN)], document[document.index(END) :]
    return f"{head}{BEGIN}\n\n{part}\n\n{rest}"


def _module(name: str) -> Iterator[str]:
    path = ROOT.joinpath(*name.split("."))
    tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
    yield f"### `{name}`"
    yield ""
    yield _text(ast.get_docstring(tree))
    yield ""
    values = list(_values(tree.body, {}))
    functions = [item for node in tree.body if isinstance(node, ast.FunctionDef) for item in _function(node)]
    if values or functions:
        yield from (*values, *functions, "")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(map(ast.unparse, node.bases))
            yield f"#### `{node.name}({bases})`" if bases else f"#### `{node.name}`"
            yield ""
            doc = split(ast.get_docstring(node))
            if doc.prose:
                yield _text(doc.prose)
                yield ""
            attributes = doc.named.get("Attributes", {})
            methods = [item for one in node.body for item in _function(one)]
            items = [*_signature(node, doc), *_values(node.body, attributes), *methods]
            if attributes:  # a dataclass, whose `__init__` is not written
                items += _sections(Docstring(named={"Raises": doc.named.get("Raises", {})}), margin="")
            if items:
                yield from (*items, "")


def _values(body: list[ast.stmt], attributes: dict[str, str]) -> Iterator[str]:
    """The public names with a docstring below them, and the fields of a class."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        if not isinstance(target, ast.Name) or target.id.startswith("_"):
            continue
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        text = text or attributes.get(target.id, "")
        if text or isinstance(node, ast.AnnAssign):
            written = ast.unparse(node)
            shown = written if len(written) <= 100 else target.id
            yield f"- `{shown}`{f': {_line(str(text))}' if text else ''}"


def _signature(node: ast.ClassDef, doc: Docstring) -> Iterator[str]:
    """How a class with its own `__init__` is made, how a protocol is called, and the members of an enumeration that
    have no docstring. `doc` is the docstring of the class, which describes the parameters of `__init__`."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__call__"):
            arguments = ast.unparse(one.args).partition(", ")[2]
            result = f" -> {ast.unparse(one.returns)}" if one.name == "__call__" and one.returns is not None else ""
            own = split(ast.get_docstring(one))
            if arguments or own.prose:
                yield f"- `{node.name}({arguments}){result}`{f': {_line(own.prose)}' if own.prose else ''}"
                yield from _sections(own if one.name == "__call__" or own.named else doc)
    if any(ast.unparse(base) == "Enum" for base in node.bases):
        pairs = zip(node.body, [*node.body[1:], None], strict=True)
        plain = (
            one.targets[0] for one, after in pairs if isinstance(one, ast.Assign) and not isinstance(after, ast.Expr)
        )
        names = [ast.unparse(target) for target in plain]
        if shown := [f"`{name}`" for name in names if not name.startswith("_")]:
            yield f"- {', '.join(shown)}"


def _function(node: ast.stmt) -> Iterator[str]:
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
        return
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    kind = " (abstract)" if "abstractmethod" in marks else ""
    arguments = ast.unparse(node.args)
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        arguments = arguments.partition(", ")[2]
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    shown = f"{node.name}{result}" if "property" in marks else f"{node.name}({arguments}){result}"
    doc = split(ast.get_docstring(node))
    yield f"- `{shown}`{kind}{f': {_line(doc.prose)}' if doc.prose else ''}"
    yield from _sections(doc)


def _sections(doc: Docstring, *, margin: str = "    ") -> Iterator[str]:
    """The sections of a docstring as a list below the item of its function."""
    for name, text in doc.named.get("Args", {}).items():
        yield f"{margin}- `{name}`: {_line(text)}"
    for section, text in doc.plain.items():
        yield f"{margin}- {section.lower()}: {_line(text)}"
    for name, text in doc.named.get("Raises", {}).items():
        yield f"{margin}- raises `{name}`: {_line(text)}"


def _text(docstring: str | None) -> str:
    """The docstring, whose notes and indented blocks stay as they are."""
    return cleandoc(docstring or "").replace("<", "&lt;")


def _line(docstring: str) -> str:
    return " ".join(cleandoc(docstring).split()).replace("<", "&lt;")


if __name__ == "__main__":
    for page, part in (("reference/contracts.md", contracts()), ("torch_device.md", needs())):
        file = ROOT / "docs" / page
        file.write_text(with_part(file.read_text(encoding="utf-8"), part), encoding="utf-8")
