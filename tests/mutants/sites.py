"""Places of a source that Cosmic Ray's operators can change, without those that mean nothing when the program runs, and
without those that no program could survive."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

Position = tuple[int, int]
"""(line, column)."""
Range = tuple[Position, Position]
LEFT_OUT = ("VariableReplacer", "VariableInserter", "NoOp")


class Site(NamedTuple):
    """One mutant: the operator's `occurrence` in the file, which changes this line."""

    file: str
    line: int
    operator: str
    occurrence: int


def sites_of(file: str, source: str) -> list[list[Site]]:
    """By place, the mutants that can be made there, in the order of the source."""
    tree = get_ast(source)
    nodes = list(ast_nodes(tree))
    parsed = ast.parse(source)
    ignored = [*map(_range, _without_meaning(parsed)), *_decorators(parsed)]
    arithmetic = _between_operands(parsed)
    places: dict[Range, list[Site]] = {}
    for name in _operators():
        occurrence = 0
        operator = get_operator(name)()
        for node in nodes:
            for start, end in operator.mutation_positions(node):
                is_unpacking = "BinaryOperator" in name and not _is_within(start, arithmetic)  # a star of `*args`
                if not is_unpacking and not _is_within(start, ignored):
                    places.setdefault((start, end), []).append(Site(file, start[0], name, occurrence))
                occurrence += 1
    return [places[place] for place in sorted(places)]


def mutated(source: str, site: Site) -> str | None:
    """`source` with the mutant in it; None if that is no program, or the same one."""
    changed = str(mutate_code(source, get_operator(site.operator)(), site.occurrence))
    try:
        return changed if ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)) else None
    except SyntaxError:
        return None


@cache
def _operators() -> list[str]:
    """Those that need no arguments; of `is` the one that turns it round, for objects have no order."""
    return sorted(
        name
        for name in operator_names()
        if not name.endswith(LEFT_OUT) and ("Operator_Is" not in name or name.endswith(("_Is_IsNot", "_IsNot_Is")))
    )


def _is_within(position: Position, ranges: list[Range]) -> bool:
    return any(first <= position < last for first, last in ranges)


def _range(node: ast.expr | ast.stmt) -> Range:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)


def _between_operands(tree: ast.Module) -> list[Range]:
    """Where the operators of arithmetic stand."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    return [(_range(node.left)[1], _range(node.right)[0]) for node in found]


def _decorators(tree: ast.Module) -> list[Range]:
    """`@abstractmethod`, and `@dataclass`, without which nothing begins; from the sign on."""
    owners = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    found = [one for owner in owners for one in owner.decorator_list]
    named = [_range(one) for one in found if "abstractmethod" in ast.dump(one) or "dataclass" in ast.dump(one)]
    return [((line, column - 1), end) for (line, column), end in named]


def _without_meaning(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Annotations, and what only type checkers read."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            yield from (one.annotation for one in named if one is not None and one.annotation is not None)
            yield from (one for one in (node.returns,) if one is not None)
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield node
