"""A profile in words: a table of modules, and the classes of modules that cost most at each depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polyaccel.observability.profiles.tree import ProfileNode

_UNITS = ("", "K", "M", "G", "T", "P")


def shown(number: float, unit: str = "") -> str:
    """`number` with three digits and a prefix: `29.4 M`."""
    at = 0
    while abs(number) >= 999.5 and at < len(_UNITS) - 1:
        number, at = number / 1000, at + 1
    return f"{number:.3g} {_UNITS[at]}{unit}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStyle:
    """What of a profile is shown: modules down to `depth` (-1: all), each module if `detailed`, and at each depth the
    `top` classes. `recomputed` is the share of a forward pass that the backward pass does again."""

    depth: int = -1
    top: int = 1
    detailed: bool = True
    recomputed: float = 0.0


def profile_table(root: ProfileNode, title: str, style: TableStyle = TableStyle()) -> str:
    """The text of a profile."""
    step = root.operations * (3 + style.recomputed)
    lines = [
        title,
        f"  parameters {shown(root.parameters or 0)}, MACs {shown(root.macs)}, FLOPs {shown(root.operations)}",
    ]
    lines[-1] += f" in the forward pass, {shown(step)} with its backward"
    if root.seconds is not None and root.rate is not None:
        lines[-1] += f"; forward {1e3 * root.seconds:.3g} ms, {shown(root.rate, 'FLOPS')}"
    if root.uncounted:
        lines.append(f"  not counted, for want of a formula: {', '.join(root.uncounted)}")
    deepest = max(depth for depth, _ in root.walk())
    deepest = deepest if style.depth < 0 else min(deepest, style.depth)
    for depth in range(deepest + 1):
        lines.append(f"  depth {depth}: {', '.join(_classes(root, depth, style.top))}")
    if style.detailed:
        lines += _aligned([_HEAD, *_rows(root, deepest)])
    return "\n".join(lines)


_HEAD = ("module", "class", "calls", "params", "MACs", "FLOPs", "share", "ms", "share", "FLOPS")


def _rows(root: ProfileNode, deepest: int) -> Iterator[tuple[str, ...]]:
    for depth, node in root.walk():
        if depth <= deepest:
            yield (
                f"{'  ' * depth}{node.label}",
                node.kind,
                str(node.calls),
                "-" if node.parameters is None else shown(node.parameters),
                shown(node.macs),
                shown(node.operations),
                _share(node.operations, root.operations),
                "-" if node.seconds is None else f"{1e3 * node.seconds:.3g}",
                _share(node.seconds, root.seconds),
                "-" if node.rate is None else shown(node.rate),
            )


def _classes(root: ProfileNode, depth: int, top: int) -> list[str]:
    """The classes at `depth` that have most operations, and then most time."""
    sums: dict[str, tuple[int, float]] = {}
    for at, node in root.walk():
        if at == depth:
            operations, seconds = sums.get(node.kind, (0, 0.0))
            sums[node.kind] = operations + node.operations, seconds + (node.seconds or 0.0)
    best = sorted(sums.items(), key=lambda item: item[1], reverse=True)[:top]
    return [
        f"{kind} {shown(operations, 'FLOPs')} ({_share(operations, root.operations)})"
        + (f" in {1e3 * seconds:.3g} ms" if seconds else "")
        for kind, (operations, seconds) in best
    ]


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.1f} %"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
