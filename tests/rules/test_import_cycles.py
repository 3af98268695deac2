"""No module needs itself: imports at the top of a module, inside of functions and for type checkers alone, all counted.

import-linter looks at cycles between siblings, where a folder is one. This test looks at cycles of modules, by the
syntax tree of every file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "polyaccel"

Graph = Mapping[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports anywhere in it: `a.b` and `a.b.c` for `from a.b import c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module of `sources`, text by name, imports: of `from a import b` the module `a.b` if there
    is one, else `a`."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        found = set()
        for imported in imported_names(ast.parse(source)):
            parent = imported.rpartition(".")[0]
            found |= {imported} & sources.keys() or {parent} & sources.keys()
        graph[name] = found - {name}
    return graph


def cycles(graph: Graph) -> list[set[str]]:
    """The strongly connected components of more than one module (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    waiting: set[str] = set()
    found: list[set[str]] = []
    for root in graph:
        if root in index:
            continue
        path = [(root, iter(sorted(graph[root])))]
        while path:
            node, rest = path[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
                waiting.add(node)
            for other in rest:
                if other not in index:
                    path.append((other, iter(sorted(graph[other]))))
                    break
                if other in waiting:
                    low[node] = min(low[node], low[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    component, stack[at:] = set(stack[at:]), []
                    waiting -= component
                    if len(component) > 1:
                        found.append(component)
    return found


def test_no_module_needs_itself() -> None:
    sources = {module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")}
    graph = import_graph(sources)
    assert sum(map(len, graph.values())) > 1000  # it has seen the imports
    told = [
        "\n".join(f"{module} -> {', '.join(sorted(graph[module] & cycle))}" for module in sorted(cycle))
        for cycle in cycles(graph)
    ]
    assert not told, "these modules import each other in a circle:\n\n" + "\n\n".join(told)


def test_every_kind_of_import_counts() -> None:
    sources = {
        "a.top": "import a.lazy",
        "a.lazy": "def f():\n    from a import typed",
        "a.typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.top import name",
        "a.free": "import a.top",
        "a.one": "import a.two",
        "a.two": "from a.one import x",
    }
    assert sorted(map(sorted, cycles(import_graph(sources)))) == [["a.lazy", "a.top", "a.typed"], ["a.one", "a.two"]]
