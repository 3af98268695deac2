"""Placement of a traced function's operations on ranks, and its programs.

[Note: Operation placement]
An input is held by one rank or by all. An operation runs on the rank that holds its inputs, or on all ranks if all hold
them. Inputs of several ranks are sent first: small ones, such as norms and flags, go to all ranks. If exactly one rank
holds large inputs, the operation runs there; else it runs on all, and the large inputs are sent too. So every function
can be placed, and one whose parameters meet in scalars sends scalars alone. Values that are sent divide the operations
into levels: a program follows once everything that it reads has arrived.

All ranks compile one program of what all of them hold, so its values are bitwise equal on all ranks. A large array that
follows from such values alone, as noise from a key, is computed by the ranks that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.jax.elementwise.graph import Atom, Constant, Graph, Node, Operation

_SMALL = 256
"""Most elements of a value that is sent to all ranks rather than waited for at the rank of another."""

Holder = int | None
"""The rank that has a value; None where all have it."""


@dataclass(frozen=True, slots=True)
class Program:
    """The compiled part of a function from the values `reads` to `makes`."""

    reads: tuple[Node, ...]
    makes: tuple[Node, ...]
    call: Callable[..., list[Any]]


@dataclass(frozen=True, slots=True)
class Sending:
    """Values that all ranks get from their holders, in this order."""

    values: tuple[tuple[int, Node], ...]


class Placement:
    """The operations of `graph` over ranks, where `holders` have its inputs. See [Note: Operation placement]."""

    def __init__(self, graph: Graph, holders: Sequence[Holder]) -> None:
        self._graph = graph
        self._holder: dict[int, Holder] = {node.index: at for node, at in zip(graph.inputs, holders, strict=True)}
        self._level: dict[int, int] = dict.fromkeys(self._holder, 0)
        self._sent: dict[int, Node] = {}
        self._operations, _ = graph.needed(graph.outputs)
        for operation in self._operations:
            self._place(operation)

    def holder(self, atom: Atom) -> Holder:
        return None if isinstance(atom, Constant) else self._holder[atom.index]

    def sent_elements(self) -> int:
        """Elements that holders send to all ranks."""
        return sum(prod(node.shape) for node in self._sent.values())

    def _place(self, operation: Operation) -> None:
        nodes = _nodes(operation.inputs)
        ranks, of_large = ({self._holder[node.index] for node in some} - {None} for some in (nodes, _large(nodes)))
        at = next(iter(ranks)) if len(ranks) == 1 else next(iter(of_large)) if len(of_large) == 1 else None
        level = max((self._arrival(node, at) for node in nodes), default=0)
        for output in operation.outputs:
            self._holder[output.index], self._level[output.index] = at, level

    def _arrival(self, node: Node, at: Holder) -> int:
        """The level from which `at` has a value, which is sent if that takes it."""
        if self._holder[node.index] in (None, at):
            return self._level[node.index]
        self._sent[node.index] = node
        return self._level[node.index] + 1

    def programs_of(self, rank: int, wanted: Sequence[Holder]) -> RankPrograms:
        """What `rank` runs and sends in order, so that the holders `wanted` have the outputs."""
        for atom, at in zip(self._graph.outputs, wanted, strict=True):
            if isinstance(atom, Node):
                self._arrival(atom, at)
        return RankPrograms(self._graph, self._operations, self._holder, self._level, self._sent, rank, wanted)


class RankPrograms:
    """The programs of one rank and the exchanges between them."""

    def __init__(
        self,
        graph: Graph,
        operations: Sequence[Operation],
        holder: Mapping[int, Holder],
        level: Mapping[int, int],
        sent: Mapping[int, Node],
        rank: int,
        wanted: Sequence[Holder],
    ) -> None:
        self._graph, self._rank = graph, rank
        self._outputs = [atom if at in (None, rank) else None for atom, at in zip(graph.outputs, wanted, strict=True)]
        self._producer = {output.index: at for at, one in enumerate(operations) for output in one.outputs}
        self._operations = operations
        places = [(holder[one.outputs[0].index], level[one.outputs[0].index]) for one in operations]
        pairs = zip(graph.outputs, wanted, strict=True)
        for_all = self._for_all(places, {atom.index for atom, at in pairs if isinstance(atom, Node) and at is None})
        """Operations of all ranks; the others that have no holder are repeated by programs that need them."""
        self._repeated = {at for at, (one, _) in enumerate(places) if one is None} - for_all
        kept = {*sent, *(atom.index for atom in graph.outputs if isinstance(atom, Node))}
        own = {node.index: node for node in _nodes(filter(None, self._outputs))}
        own_ends = [node for index, node in own.items() if self._producer.get(index) in self._repeated]
        self._steps: list[Program | Sending] = []
        last = max([*(of for _, of in places), *(level[index] + 1 for index in sent), 0])
        for number in range(last + 1):
            arriving = tuple((holder[index] or 0, node) for index, node in sent.items() if level[index] + 1 == number)
            if arriving:
                self._steps.append(Sending(arriving))
            shared = {at for at in for_all if places[at][1] == number}
            mine = {at for at, place in enumerate(places) if place == (rank, number)}
            for part, ends_here in ((shared, []), (mine, own_ends if number == last else [])):
                made = self._read_outside(part, kept)
                if made or ends_here:
                    self._steps.append(self._program([*made, *ends_here], part))
        self._uses = self._last_uses()

    def _for_all(self, places: Sequence[tuple[Holder, int]], ends: Collection[int]) -> set[int]:
        found, needed = set[int](), set(ends)
        for at in reversed(range(len(places))):
            operation = self._operations[at]
            outputs = operation.outputs
            is_needed = len(_large(outputs)) < len(outputs) or any(output.index in needed for output in outputs)
            if places[at][0] is None and is_needed:
                found.add(at)
                needed |= {node.index for node in _nodes(operation.inputs)}
        return found

    def _read_outside(self, part: Collection[int], kept: Collection[int]) -> list[Node]:
        """The results of the operations `part` that others read, or that are `kept`."""
        read = set(kept)
        for at, operation in enumerate(self._operations):
            if at not in part:
                read |= {node.index for node in _nodes(operation.inputs)}
        return [output for at in sorted(part) for output in self._operations[at].outputs if output.index in read]

    def _program(self, makes: Sequence[Node], part: Collection[int]) -> Program:
        inside, found, reads = {*part, *self._repeated}, set[int](), dict[int, Node]()
        waiting = list(makes)
        while waiting:
            node = waiting.pop()
            at = self._producer.get(node.index)
            if at is None or at not in inside:
                reads[node.index] = node
            elif at not in found:
                found.add(at)
                waiting += _nodes(self._operations[at].inputs)
        order = [self._operations[at] for at in sorted(found)]
        given = tuple(reads[index] for index in sorted(reads))

        def call(values: Sequence[Any]) -> list[Any]:
            known = {node.index: value for node, value in zip(given, values, strict=True)}
            for operation in order:
                inputs = [known[atom.index] if isinstance(atom, Node) else atom.value for atom in operation.inputs]
                result = operation.primitive.bind(*map(_traced, inputs), **operation.params)
                results = result if operation.primitive.multiple_results else [result]
                known |= {node.index: value for node, value in zip(operation.outputs, results, strict=True)}
            return [known[node.index] for node in makes]

        return Program(given, tuple(makes), jax.jit(call))

    def _last_uses(self) -> list[set[int]]:
        """The values that nothing needs after each step."""
        needed = {node.index for node in _nodes(filter(None, self._outputs))}
        uses: list[set[int]] = []
        for step in reversed(self._steps):
            nodes = step.reads if isinstance(step, Program) else [node for _, node in step.values]
            now = {node.index for node in nodes} - needed
            uses.append(now)
            needed |= now
        return uses[::-1]

    def run(
        self, inputs: Sequence[Any], exchange: Callable[[Sequence[tuple[int, Node]], dict[int, Any]], None]
    ) -> list[Any]:
        """Return this rank's outputs, None for those of others, as in `inputs`. Collective.

        `exchange` adds to values by their node's index those that other ranks hold.
        """
        pairs = zip(self._graph.inputs, inputs, strict=True)
        values = {node.index: value for node, value in pairs if value is not None}
        for step, over in zip(self._steps, self._uses, strict=True):
            if isinstance(step, Sending):
                exchange(step.values, values)
            else:
                made = step.call([values[node.index] for node in step.reads])
                values |= {node.index: value for node, value in zip(step.makes, made, strict=True)}
            for index in over:
                values.pop(index, None)
        found = []
        for atom in self._outputs:
            found.append(None if atom is None else atom.value if isinstance(atom, Constant) else values[atom.index])
        return found


def _nodes(atoms: Iterable[Atom]) -> list[Node]:
    return [atom for atom in atoms if isinstance(atom, Node)]


def _large(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if prod(node.shape) > _SMALL]


def _traced(value: Any) -> Any:
    is_key = jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.extended)
    return value if is_key else jnp.asarray(value)


__all__ = ["Holder", "Placement", "Program", "RankPrograms", "Sending"]
