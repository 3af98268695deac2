"""From what pydantic found to what a user reads: a dotted key, the value, what was expected, the hint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from polyaccel.config.keys import Path, dotted, section_names, suggest_key, suggest_word
from polyaccel.config.section import Section
from polyaccel.config.unsupported_keys import DROP_IN_KEYS, Absent, absent_keys, entry_of, is_above
from polyaccel.errors import Problem

M = TypeVar("M", bound=Section)
_MAX_PASSES = 20
_MOST_SUGGESTIONS = 50
"""Unknown keys for which a similar key is looked for, in one table: that takes a millisecond a key."""


def validate_tree(model: type[M], tree: Any, *, prefix: Path = ()) -> tuple[M | None, list[Problem]]:
    """Return an instance of `model` without offending keys (None if impossible), and every problem of `tree`."""
    problems: list[Problem] = []
    for attempt in range(_MAX_PASSES):
        try:
            return model.model_validate(tree), problems
        except ValidationError as error:
            details = error.errors(include_url=False)
            if attempt == 0:
                unknown = count()
                problems = _merged([_problem(model, tree, item, prefix, unknown) for item in details])
            tree = _without(tree, [_blamed(tree, item) for item in details])
    return None, problems


def _problem(model: type[Section], tree: Any, item: ErrorDetails, prefix: Path, unknown: Iterator[int]) -> Problem:
    path = _place(tree, item)
    key = dotted((*prefix, *path))
    value = item["input"]
    kind = item["type"]
    if kind == "extra_forbidden":
        return unknown_key(model, path, value, prefix=prefix, suggests=next(unknown) < _MOST_SUGGESTIONS)
    if kind == "missing":
        return Problem(key, None, "is required and missing", "give it a value")
    if kind in ("model_type", "dict_type"):
        return Problem(key, value, "should be an object", 'write {"key": value, ...}')
    message = item["msg"].removeprefix("Value error, ").replace("Input should", "should").replace("tuple", "list")
    return Problem(key, value, message, _cure(value, kind, item.get("ctx", {})))


def unknown_key(model: type[Section], path: Path, value: Any, *, prefix: Path = (), suggests: bool = True) -> Problem:
    """Return the problem of an unknown key, with a similar key if it `suggests`; absent keys count for the root."""
    if not suggests:
        return Problem(dotted((*prefix, *path)), value, "is not a known key", "remove it")
    is_removed = not prefix and dotted(path) in DROP_IN_KEYS
    hint = "remove it" if is_removed else suggest_key(model, path, () if prefix else absent_keys())
    if hint == "remove it" and not prefix:
        hint = "remove it; `polyaccel config check --deepspeed` explains keys of DeepSpeed"
    if prefix:
        hint = hint.replace("did you mean '", f"did you mean '{dotted(prefix)}.")
    return Problem(dotted((*prefix, *path)), value, "is not a known key", hint)


def pop_unsupported(model: type[Section], tree: dict[str, Any]) -> tuple[list[Problem], dict[str, str]]:
    """Remove absent keys from `tree`; return problems, and sentences on keys without effect, by key."""
    without_effect: dict[str, str] = {}
    return list(_take_absent(model, section_names(model), tree, (), count(), without_effect)), without_effect


def _take_absent(
    model: type[Section],
    sections: frozenset[str],
    table: dict[str, Any],
    parents: tuple[str, ...],
    unknown: Iterator[int],
    without_effect: dict[str, str],
) -> Iterator[Problem]:
    for name, value in list(table.items()):
        path = (*parents, name)
        key = ".".join(path)
        if (found := entry_of(key)) is not None:
            del table[name]
            if found[0].is_tuning and _is_equal(value, found[1]):
                if value != found[1]:
                    without_effect[key] = f"{key} = {value!r} has no effect: {found[0].feature}"
            else:
                yield from _absent_problem(key, value, *found)
        elif is_above(key):
            if isinstance(value, dict):
                yield from _take_absent(model, sections, value, path, unknown, without_effect)
            elif key not in sections:
                hint = 'write {"key": value, ...}, or leave it out'
                yield Problem(key, value, "should be an object", hint)
            if key not in sections:
                del table[name]
        elif parents and ".".join(parents) not in sections:
            yield unknown_key(model, path, value, suggests=next(unknown) < _MOST_SUGGESTIONS)


def _absent_problem(key: str, value: Any, entry: Absent, harmless: Any) -> Iterator[Problem]:
    is_harmless = isinstance(value, bool) == isinstance(harmless, bool) and value == harmless  # 1 is not true
    if entry.is_tuning:
        expected = "true or false" if isinstance(harmless, bool) else "a number"
        yield Problem(key, value, f"should be {expected}", "leave the key out, for it has no effect")
    elif entry.switch in (None, key) and not is_harmless:
        yield Problem(key, value, f"belongs to {entry.feature}, which polyaccel does not have", entry.hint)


def _is_equal(value: Any, usual: Any) -> bool:
    """Return whether `value` fits a tuning key whose usual value is `usual`."""
    if isinstance(usual, bool):
        return isinstance(value, bool)
    return (value is None and usual is None) or (isinstance(value, int | float) and not isinstance(value, bool))


_HINTS = {
    "int_type": "write a whole number",
    "float_type": "write a number",
    "finite_number": "write a finite number",
    "bool_type": "write true or false",
    "string_type": "write a string in quotes",
    "tuple_type": "write a list [...]",
    "too_long": "remove items",
}


def _cure(value: Any, kind: str, context: Mapping[str, Any]) -> str:
    if value == "auto":
        return '"auto" is not available for this key; write a value'
    if isinstance(value, str) and kind == "literal_error":
        known = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        return suggest_word(value, known) or "choose one of these"
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        word = value.strip().lower()
        if word in ("true", "false") or _is_number(word):
            return f"write {word} without quotes"
    return _HINTS.get(kind, "change the value")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _place(tree: Any, item: ErrorDetails) -> Path:
    """Where in `tree` the error is: pydantic's location without the names of union members that it adds."""
    path: list[str | int] = []
    node = tree
    for position, part in enumerate(item["loc"]):
        if _has(node, part):
            node = node[part]
        elif item["type"] != "missing" or position != len(item["loc"]) - 1:
            continue
        path.append(part)
    return tuple(path)


def _has(node: Any, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(node, list | tuple) and part < len(node)
    return isinstance(node, Mapping) and part in node


def _merged(problems: list[Problem]) -> list[Problem]:
    """One problem a key: the members of a union complain one by one."""
    merged: dict[str, Problem] = {}
    for problem in problems:
        known = merged.get(problem.key)
        if known is None:
            merged[problem.key] = problem
        elif problem.expected not in known.expected:
            expected = f"{known.expected}, or {problem.expected}"
            merged[problem.key] = Problem(known.key, known.value, expected, known.hint or problem.hint)
    # "should be 'auto'" about a list adds nothing to the problem of its item.
    lists = {key[:at] for key in merged for at, char in enumerate(key) if char == "["}
    return [problem for key, problem in merged.items() if key not in lists]


def _blamed(tree: Any, item: ErrorDetails) -> Path:
    """The key to leave out to get past an error: the key itself, its parent when it is missing, a list as a whole."""
    path = _place(tree, item)
    if item["type"] == "missing":
        path = path[:-1]
    indices = [position for position, part in enumerate(path) if isinstance(part, int)]
    return path[: indices[0]] if indices else path


def _without(tree: Any, paths: list[Path]) -> Any:
    if () in paths or not isinstance(tree, Mapping):
        return {}
    below: dict[str | int, list[Path]] = defaultdict(list)
    for path in paths:
        below[path[0]].append(path[1:])
    return {
        name: _without(child, below[name]) if name in below else child
        for name, child in tree.items()
        if () not in below.get(name, ())
    }
