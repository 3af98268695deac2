"""The config keys and command-line options of a DeepSpeed, read from its source without importing it.

Keys are found where the config is read: a small interpreter follows the config from `DeepSpeedConfig` through
functions, subscripts, `get_scalar_param` and pydantic models. Strings, numbers and names are read; no code is kept.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

ROOTS = (
    ("deepspeed.runtime.config", "DeepSpeedConfig.__init__", "config", ""),
    ("deepspeed.runtime.config", "DeepSpeedConfig._initialize_params", "param_dict", ""),
    ("deepspeed.runtime.config", "DeepSpeedConfig._do_warning_check", "self._param_dict", ""),
    ("deepspeed", "initialize", "config", ""),
    ("deepspeed.autotuning.config", "DeepSpeedAutotuningConfig.__init__", "param_dict", ""),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine.__init__", "self._config.pipeline", "pipeline"),
    (
        "deepspeed.module_inject.autotp_config",
        "AutoTPConfig.from_dict",
        "config_dict",
        "tensor_parallel.partition_config",
    ),
)
"""Functions that are given the config, or a table of it as an argument that the interpreter cannot follow: module,
function, argument, and the table."""
MODELS = {"DeepSpeedMonitorConfig": ""}
"""Models of pydantic that get tables by another way than `**`, and where they stand."""
LAUNCHER = "deepspeed.launcher.runner"
GETTERS = ("get_scalar_param", "get_list_param", "get_dict_param")
"""DeepSpeed's functions that read one key of a table."""
SAME = ("copy", "deepcopy", "dict", "keys", "list", "items", "values")
"""Calls whose result still has the keys of their argument or owner."""
SKIPPED = ("inference", "ops", "model_implementations")
"""Packages that read another config, or none."""

Paths = frozenset[str]
NONE: Paths = frozenset()
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Scope:
    """What names stand for in a function: tables of the config, lists of constant strings, dict literals."""

    module: str
    owner: str
    tables: dict[str, Paths] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)
    literals: dict[str, list[str]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)


class Source:
    """All modules of a DeepSpeed in `folder`, parsed when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys: set[str] = set()
        self._seen: dict[object, Paths] = {}

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """Return the syntax trees by dotted name."""
        found = {}
        for path in sorted(self.folder.rglob("*.py")):
            parts = path.relative_to(self.folder).with_suffix("").parts
            if parts[0] not in SKIPPED or parts == ("inference", "config"):
                name = ".".join(("deepspeed", *parts)).removesuffix(".__init__")
                found[name] = ast.parse(path.read_text(encoding="utf-8"))
        return found

    @cached_property
    def functions(self) -> dict[tuple[str, str], Function]:
        """Return functions and methods by module and name, `Class.method` for the latter."""
        found: dict[tuple[str, str], Function] = {}
        for module, tree in self.modules.items():
            for node in tree.body:
                if isinstance(node, Function):
                    found[module, node.name] = node
                elif isinstance(node, ast.ClassDef):
                    found |= {
                        (module, f"{node.name}.{one.name}"): one for one in node.body if isinstance(one, Function)
                    }
        return found

    @cached_property
    def classes(self) -> dict[str, tuple[str, ast.ClassDef]]:
        """Return classes by name, with their modules."""
        return {
            node.name: (module, node)
            for module, tree in self.modules.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }

    @cached_property
    def constants(self) -> dict[str, dict[str, list[str]]]:
        """Return constant strings, and the keys of constant dicts, by module and name; under "" those of any module."""
        found: dict[str, dict[str, list[str]]] = {"": {}}
        for module, tree in self.modules.items():
            mine = found[module] = {}
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    words = _words(node.value, {})
                    if words:
                        mine[node.targets[0].id] = words
            found[""] = mine | found[""]
        return found

    def read(self) -> set[str]:
        """Return all keys that the config may have."""
        for module, name, argument, path in ROOTS:
            scope = Scope(module, name.rpartition(".")[0], {argument: frozenset({path})})
            self._run(self.functions[module, name].body, scope)
        for name, path in MODELS.items():
            self.keys |= set(self._fields(name, path))
        return self.keys

    # Statements.

    def _run(self, body: list[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Assign(targets=[target], value=value):
                self._assign(target, value, scope)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, value, scope)
            case ast.For(target=target, iter=iterated, body=body):
                self._loop(target, iterated, scope)
                self._run(body, scope)
            case ast.Return(value=value) if value is not None:
                scope.returned |= self._tables(value, scope)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self._statement(child, scope)
                    elif isinstance(child, ast.ExceptHandler):
                        self._run(child.body, scope)
                    elif isinstance(child, ast.expr):
                        self._tables(child, scope)
                    elif isinstance(child, ast.withitem):
                        self._tables(child.context_expr, scope)

    def _assign(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        name, tables = ast.unparse(target), self._tables(value, scope)
        if isinstance(target, ast.Subscript):
            self._tables(target, scope)
        scope.tables[name] = scope.tables.get(name, NONE) | tables
        if isinstance(value, ast.Dict):
            scope.literals[name] = _words(value, {})
        if words := self._constant(value, scope):
            scope.words[name] = words

    def _loop(self, target: ast.expr, iterated: ast.expr, scope: Scope) -> None:
        tables = self._tables(iterated, scope)
        first = target.elts[0] if isinstance(target, ast.Tuple) else target
        over = (
            iterated.func.value
            if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute)
            else iterated
        )
        if words := self._constant(over, scope):
            scope.words[ast.unparse(first)] = words
        elif tables and isinstance(target, ast.Name):
            scope.tables[target.id] = frozenset(f"{path}[]" for path in tables)
        elif tables:  # every key of the table goes over the keys of a dict literal
            for words in scope.literals.values():
                self._found(tables, words)

    # Expressions.

    def _tables(self, node: ast.expr, scope: Scope) -> Paths:
        """Return the tables of the config that `node` may be; note the keys that it reads."""
        known = scope.tables.get(ast.unparse(node)) if isinstance(node, (ast.Name, ast.Attribute)) else None
        if known is not None:
            return known
        match node:
            case ast.Subscript(value=owner, slice=index):
                return self._found(self._tables(owner, scope), self._constant(index, scope))
            case ast.Compare(left=left, comparators=[right]):
                self._found(self._tables(right, scope), self._constant(left, scope))
                self._tables(left, scope)
                return NONE
            case ast.Call():
                return self._call(node, scope)
        parts = [self._tables(child, scope) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return NONE.union(*parts) if isinstance(node, (ast.IfExp, ast.BoolOp)) else NONE

    def _call(self, node: ast.Call, scope: Scope) -> Paths:
        given = [self._tables(argument, scope) for argument in node.args]
        named = {one.arg or "**": self._tables(one.value, scope) for one in node.keywords}
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name in GETTERS:
            return self._found(given[0], self._constant(node.args[1], scope))
        if isinstance(called, ast.Attribute):
            owner = self._tables(called.value, scope)
            if owner and name in ("get", "pop", "setdefault") and node.args:
                return self._found(owner, self._constant(node.args[0], scope))
            if owner and name in SAME:
                return owner
            if isinstance(called.value, ast.Name) and called.value.id == "self":
                return self._enter(scope.module, f"{scope.owner}.{name}", [NONE, *given], named)
        if name in SAME:
            return given[0] if given else NONE
        if name in self.classes and (any(given) or any(named.values())):
            return self._make(name, given, named)
        said: dict[str | int, list[str]] = {}
        for place, value in enumerate(node.args):
            said[place] = self._constant(value, scope)
        for one in node.keywords:
            said[one.arg or "**"] = self._constant(one.value, scope)
        said = {place: words for place, words in said.items() if words}
        return self._enter(scope.module, name, given, named, said)

    def _make(self, name: str, given: list[Paths], named: Mapping[str, Paths]) -> Paths:
        """Follow tables into a class: the fields of a pydantic model, or the constructor of another one."""
        module, _ = self.classes[name]
        for path in named.get("**", NONE):
            for model_path in self._fields(name, path):
                self.keys.add(model_path)
        return self._enter(module, f"{name}.__init__", [NONE, *given], named)

    def _fields(self, name: str, path: str) -> Iterator[str]:
        _, node = self.classes[name]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                yield from self._fields(base.id, path)
        for one in node.body:
            if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
                continue
            below = [
                part.id for part in ast.walk(one.annotation) if isinstance(part, ast.Name) and self._is_model(part.id)
            ]
            for key in dict.fromkeys((one.target.id, *_alias(one.value))):
                here = f"{path}.{key}".removeprefix(".")
                yield here
                for model in below:
                    yield from self._fields(model, here)

    def _is_model(self, name: str) -> bool:
        if name == "DeepSpeedConfigModel":
            return True
        bases = self.classes[name][1].bases if name in self.classes else []
        return any(isinstance(base, ast.Name) and self._is_model(base.id) for base in bases)

    def _enter(
        self,
        module: str,
        name: str,
        given: list[Paths],
        named: Mapping[str, Paths],
        said: Mapping[str | int, list[str]] = MappingProxyType({}),
    ) -> Paths:
        """Follow tables into a function, of `module` if it has one of that name, and return what it returns."""
        if not any(given) and not any(named.values()):
            return NONE
        places = [place for place in self.functions if place[1] == name]
        place = (module, name) if (module, name) in self.functions else places[0] if len(places) == 1 else None
        if place is None:
            return NONE
        function = self.functions[place]
        arguments = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        tables = dict(zip(arguments, given, strict=False)) | {key: value for key, value in named.items() if key != "**"}
        words = self._defaults(function, place[0])
        words |= {key if isinstance(key, str) else arguments[key]: value for key, value in said.items()}
        bound = (place, str(sorted(tables.items(), key=lambda item: item[0])), str(words))
        if bound not in self._seen:
            self._seen[bound] = NONE  # a function that calls itself adds nothing
            known = {key: value for key, value in tables.items() if value}
            scope = Scope(place[0], name.rpartition(".")[0], known, words)
            self._run(function.body, scope)
            self._seen[bound] = frozenset(scope.returned)
        return self._seen[bound]

    def _defaults(self, function: Function, module: str) -> dict[str, list[str]]:
        """Return the constant strings that arguments of `function` have as defaults."""
        arguments, defaults = function.args.args, function.args.defaults
        given = zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        return {one.arg: words for one, value in given if (words := self._constant(value, Scope(module, "")))}

    def _found(self, tables: Paths, words: list[str]) -> Paths:
        paths = frozenset(f"{path}.{word}".removeprefix(".") for path in tables for word in words)
        self.keys |= paths
        return paths

    def _constant(self, node: ast.expr, scope: Scope) -> list[str]:
        mine = self.constants[scope.module]
        return _words(node, scope.words) or _words(node, mine) or _words(node, self.constants[""])


def _words(node: ast.expr, known: Mapping[str, list[str]]) -> list[str]:
    """Return the strings that `node` is: a literal, a name of one, the keys of a dict."""
    match node:
        case ast.Constant(value=str(word)):
            return [word]
        case ast.Name(id=name):
            return known.get(name, [])
        case ast.Attribute(attr=name):
            return known.get(name, [])
        case ast.Dict(keys=keys):
            return [word for key in keys if key is not None for word in _words(key, known)]
    return []


def _alias(value: ast.expr | None) -> list[str]:
    """Return the other name of a field of pydantic's."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return [word for one in keywords if one.arg == "alias" for word in _words(one.value, {})]


def config_keys(source: Source) -> list[str]:
    """Return the dotted keys that a DeepSpeed reads, `[]` after a list, without tables of others."""
    found = source.read()
    tables = {key.rpartition(".")[0] for key in found} | {key.partition("[]")[0] for key in found if "[]" in key}
    return sorted(found - tables)


def launcher_options(source: Source) -> list[str]:
    """Return the options of the command `deepspeed`."""
    tree = source.modules[LAUNCHER]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    added = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"]
    return sorted({word for node in added for one in node.args for word in _words(one, {}) if word.startswith("-")})


def public_modules(folder: Path) -> list[str]:
    """Return the names of all modules without a leading underscore in a part."""
    parts = [path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")]
    names = {".".join(("deepspeed", *one)).removesuffix(".__init__") for one in parts}
    return sorted(name for name in names if not any(part.startswith("_") for part in name.split(".")))
