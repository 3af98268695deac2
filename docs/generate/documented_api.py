"""The documented API: what docs/reference/api.md and docs/reference/contracts.md show. Imports no polyaccel.

`documented` finds its classes and functions by their source alone, and `gaps` says what a docstring lacks. `python
docs/generate/documented_api.py` prints the files that have them, for pydoclint.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from google_docstring import split

ROOT = Path(__file__).parents[2]
API_PAGE = ROOT / "docs" / "reference" / "api.md"
CONTRACTS_PAGE = ROOT / "docs" / "reference" / "contracts.md"
_OBJECT = re.compile(r"^::: (polyaccel[\w.]*)$", re.MULTILINE)
_INHERITED = re.compile(
    r"^::: (polyaccel[\w.]*)\n {4}options:\n(?: {6}.*\n)*? {6}inherited_members:\n((?: {8}- \w+\n)+)", re.M
)
"""A class that shows these methods of its bases."""
_ROW = re.compile(r"^\| `(polyaccel[\w.]*)` \|", re.MULTILINE)
_IMPLEMENTS = re.compile(r"Implement `\w+Fn`")
"""A kernel, whose parameters the protocol in polyaccel.ops.base describes."""
_TESTKIT = "polyaccel.testkit."

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Documented:
    """A class or function at the top of a module.

    Attributes:
        module: Dotted name of the module that defines it.
        node: Its definition.
        page: "api" or "contracts": the page that shows it.
    """

    module: str
    node: ast.ClassDef | Function
    page: str

    @property
    def name(self) -> str:
        """Dotted name, module included."""
        return f"{self.module}.{self.node.name}"


def documented(sections: dict[str, tuple[str, ...]]) -> list[Documented]:
    """Find the classes and functions of both pages.

    Args:
        sections: Modules of the contracts by section, as `contracts.SECTIONS`.

    Returns:
        Each class or function once, those of the contracts first.
    """
    modules = [module for names in sections.values() for module in names]
    modules += [name for name in _ROW.findall(CONTRACTS_PAGE.read_text(encoding="utf-8")) if name.startswith(_TESTKIT)]
    found = {one.name: one for module in modules for one in _of(module, "contracts")}
    for name in _OBJECT.findall(API_PAGE.read_text(encoding="utf-8")):
        for one in _of(name, "api"):
            found.setdefault(one.name, one)
    for name, members in _INHERITED.findall(API_PAGE.read_text(encoding="utf-8")):
        module, _, kind = name.rpartition(".")
        for one in _bases(module, kind, set(re.findall(r"\w+", members))):
            found.setdefault(one.name, one)
    return list(found.values())


def gaps(one: Documented) -> Iterator[str]:
    """List what the docstrings of a class or function lack.

    Args:
        one: The class or function.

    Yields:
        "NAME: LACK" for a docstring, parameter, field or result that is not described.
    """
    if isinstance(one.node, ast.ClassDef):
        yield from (f"{one.name}{lack}" for lack in _class_gaps(one.module, one.node))
    else:
        yield from (f"{one.name}{lack}" for lack in _function_gaps(one.node, ast.get_docstring(one.node)))


def path_of(module: str) -> Path:
    """Find the file of a module.

    Args:
        module: Its dotted name.

    Returns:
        The file, which may not exist.
    """
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def _of(name: str, page: str) -> list[Documented]:
    """The object called `name`; of a module, each public one that it defines or, in a package, offers."""
    if not path_of(name).exists():
        found = _defined(*name.rpartition(".")[::2])
        return [] if found is None else [Documented(found[0], found[1], page)]
    public = [node for node in _tree(name).body if isinstance(node, ast.ClassDef | Function)]
    here = [Documented(name, node, page) for node in public if not node.name.startswith("_")]
    if path_of(name).name == "__init__.py":
        offered = [alias.name for node in _tree(name).body if isinstance(node, ast.ImportFrom) for alias in node.names]
        sources = [found for each in offered if (found := _defined(name, each)) is not None]
        here += [Documented(module, node, page) for module, node in sources]
    return here


def _defined(module: str, name: str) -> tuple[str, ast.ClassDef | Function] | None:
    """The definition of `name` as seen in `module`, and the module that has it; None outside of polyaccel."""
    if not module.startswith("polyaccel") or not path_of(module).exists():
        return None
    for node in reversed(_tree(module).body):  # overloads come before what they describe
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module:
                    return _defined(node.module, alias.name)
    return None


def _bases(module: str, name: str, members: set[str]) -> Iterator[Documented]:
    """The bases of a class that define any of these methods, and theirs."""
    found = _defined(module, name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return
    for base in found[1].bases:
        above = _defined(found[0], ast.unparse(base).partition("[")[0])
        if above is not None and isinstance(above[1], ast.ClassDef):
            if members & {item.name for item in above[1].body if isinstance(item, Function)}:
                yield Documented(*above, "api")
            yield from _bases(above[0], above[1].name, members)


def _class_gaps(module: str, node: ast.ClassDef) -> Iterator[str]:
    doc = split(ast.get_docstring(node))
    is_signature = [item.name for item in node.body if isinstance(item, Function)] == ["__call__"]
    if not doc.prose and not is_signature:
        yield ": docstring"
    for name in _fields(node):
        if name not in doc.named.get("Attributes", {}) and name not in doc.named.get("Args", {}):
            yield f".{name}: Attributes"
    for method in (item for item in node.body if isinstance(item, Function)):
        if method.name.startswith("test_"):
            if not ast.get_docstring(method):
                yield f".{method.name}: docstring"
        elif method.name == "__init__":
            text = ast.get_docstring(method)
            own = split(text).named.get("Args") is not None
            yield from _function_gaps(method, text if own else ast.get_docstring(node) or "Its parameters.")
        elif not method.name.startswith("_") or method.name == "__call__":
            text = ast.get_docstring(method)
            if text is not None or not _inherits(module, node, method.name):
                yield from (f".{method.name}{lack}" for lack in _function_gaps(method, text))


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """The public fields of a dataclass or named tuple that have no docstring of their own."""
    marks = [ast.unparse(mark).partition("(")[0] for mark in node.decorator_list]
    if "dataclass" not in marks and "NamedTuple" not in map(ast.unparse, node.bases):
        return
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        is_field = isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
        if is_field and isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not has_text and not item.target.id.startswith("_"):
                yield item.target.id


def _inherits(module: str, node: ast.ClassDef, method: str) -> bool:
    """Whether a base class describes this method."""
    for base in node.bases:
        found = _defined(module, ast.unparse(base).partition("[")[0])
        if found is None or not isinstance(found[1], ast.ClassDef):
            continue
        own = [item for item in found[1].body if isinstance(item, Function) and item.name == method]
        if any(ast.get_docstring(item) for item in own) or _inherits(*found, method):  # type: ignore[arg-type]
            return True
    return False


def _function_gaps(node: Function, text: str | None) -> Iterator[str]:
    if any(ast.unparse(mark).endswith(".setter") for mark in node.decorator_list):
        return  # the property describes it
    doc = split(text)
    if not doc.prose:
        yield ": docstring"
        return
    if _IMPLEMENTS.match(doc.prose):
        return
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    parameters = list(_parameters(node))
    for name in parameters:
        if not doc.named.get("Args", {}).get(name):
            yield f": Args {name}"
    result = "None" if node.returns is None else ast.unparse(node.returns)
    if result in ("None", "NoReturn") or marks & {"property", "cached_property"}:
        return
    says = not parameters and doc.prose.split()[0] in ("Return", "Yield")
    if not doc.plain and not says:
        yield ": Returns"


def _parameters(node: Function) -> Iterator[str]:
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    yield from (name for name in names if name not in ("self", "cls"))
    if given.vararg is not None:
        yield f"*{given.vararg.arg}"
    yield from (one.arg for one in given.kwonlyargs)
    if given.kwarg is not None:
        yield f"**{given.kwarg.arg}"


if __name__ == "__main__":
    from contracts import SECTIONS

    print(*sorted({str(path_of(one.module).relative_to(ROOT)) for one in documented(SECTIONS)}), sep="\n")
