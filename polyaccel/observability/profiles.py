"""Where the operations and the time of a model are: a tree of its modules, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from logging import getLogger
from math import floor
from pathlib import Path
from zlib import crc32


@dataclass(frozen=True, slots=True)
class ProfileNode:
    """A module, with all that is inside it.

    `operations` are floating-point operations of products and convolutions in forward passes, `seconds` the time of
    these passes (None: not measured), `calls` their number, `parameters` None where it is unknown whose they are. What
    `children` have is part of what the module has.
    """

    name: str
    """The full name; "" is the model's."""
    kind: str
    """The name of its class."""
    parameters: int | None
    operations: int
    seconds: float | None
    calls: int
    children: tuple[ProfileNode, ...] = ()
    uncounted: tuple[str, ...] = ()
    """Of a model: the operations that ran and are not in `operations`, because they have no formula."""

    @property
    def macs(self) -> int:
        """Multiplications with their additions."""
        return self.operations // 2

    @property
    def rate(self) -> float | None:
        """Operations a second; None without a time."""
        return self.operations / self.seconds if self.seconds else None

    @property
    def label(self) -> str:
        """The last part of the name; the class of the model itself."""
        return self.name.rpartition(".")[2] or self.kind

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ProfileNode]]:
        """Every module below, itself first, with how deep it is."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def tree_of(nodes: Mapping[str, ProfileNode]) -> ProfileNode:
    """Build the tree of `nodes` by full name; a missing parent is replaced by the nearest above."""
    below: dict[str, list[str]] = {name: [] for name in nodes}
    for name in nodes:
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in nodes:
                below[parent].append(name)
                break

    def made(name: str) -> ProfileNode:
        one = nodes[name]
        children = tuple(made(child) for child in below[name])
        operations, seconds = one.operations, one.seconds
        if not one.calls:  # a list of modules, which is never called itself
            operations = sum(child.operations for child in children)
            times = [child.seconds for child in children if child.seconds is not None]
            seconds = sum(times) if times else None
        return ProfileNode(name, one.kind, one.parameters, operations, seconds, one.calls, children, one.uncounted)

    return made("")


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
        lines += _aligned([_HEADINGS, *_rows(root, deepest)])
    return "\n".join(lines)


_HEADINGS = ("module", "class", "calls", "params", "MACs", "FLOPs", "share", "ms", "share", "FLOPS")


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


_WIDTH, _ROW, _HEAD = 1200, 22, 30
_CHAR = 6.6
"""About the width of a letter."""
_LEAST_WIDTH = 0.3
_STYLE = (
    "text{font:11px sans-serif;fill:#222}rect{stroke:#fff;stroke-width:.5}.bg{fill:#fff;stroke:none}.t{font-size:14px}"
    "@media(prefers-color-scheme:dark){.bg{fill:#161616}rect{stroke:#161616}.t{fill:#eee}}"
)


def flame_svg(root: ProfileNode, title: str) -> str:
    """Draw an SVG flame graph without external parts; widths are times, else operations."""
    by_time = root.seconds is not None
    deepest = max(depth for depth, _ in root.walk())
    height = _HEAD + _ROW * (deepest + 1) + 8
    what = "forward time" if by_time else "operations"
    rows = "\n".join(_boxes(root, 0, 0.0, float(_WIDTH), by_time=by_time))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">\n'
        f"<style>{_STYLE}</style>\n"
        f'<rect class="bg" width="{_WIDTH}" height="{height}"/>\n'
        f'<text class="t" x="4" y="20">{escape(title)}: {what}</text>\n{rows}\n</svg>\n'
    )


def _boxes(node: ProfileNode, depth: int, left: float, width: float, *, by_time: bool) -> Iterator[str]:
    if width < _LEAST_WIDTH:
        return
    top = _HEAD + _ROW * depth
    said = f"{node.name or 'model'} ({node.kind}): {shown(node.operations)} FLOPs"
    if node.parameters is not None:
        said += f", {shown(node.parameters)} parameters"
    if node.seconds is not None:
        said += f", {1e3 * node.seconds:.3g} ms"
    if node.rate is not None:
        said += f", {shown(node.rate, 'FLOPS')}"
    room = floor((width - 6) / _CHAR)
    label = node.label if len(node.label) <= room else node.label[: room - 1] + "…" if room > 3 else ""
    hue = crc32(node.kind.encode()) % 360
    yield (
        f'<g><title>{escape(said)}</title><rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 1}" '
        f'fill="hsl({hue} 60% 75%)"/><text x="{left + 3:.2f}" y="{top + 15}">{escape(label)}</text></g>'
    )
    whole = _size(node, by_time=by_time)
    inside = sum(_size(child, by_time=by_time) for child in node.children)
    scale = width / max(whole, inside) if max(whole, inside) else 0.0  # a module that is used twice is inside twice
    for child in node.children:
        own = _size(child, by_time=by_time) * scale
        yield from _boxes(child, depth + 1, left, own, by_time=by_time)
        left += own


def _size(node: ProfileNode, *, by_time: bool) -> float:
    return (node.seconds or 0.0) if by_time else float(node.operations)


log = getLogger(__name__)
FLAME_FILE = "flops_profile.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """The optimizer step that is profiled, from 1, and what becomes of its profile: the table goes to `output_file`
    (None: the log), the picture to `folder` (None: that of `output_file`, or nowhere)."""

    step: int
    style: TableStyle = field(default_factory=TableStyle)
    output_file: str | None = None
    folder: str | None = None


def report_profile(root: ProfileNode, title: str, settings: ProfileSettings) -> None:
    """Write a profile; a file that cannot be written is a line in the log, for training continues."""
    table = profile_table(root, title, settings.style)
    picture = None
    if settings.folder is not None:
        picture = Path(settings.folder, FLAME_FILE)
    elif settings.output_file is not None:
        picture = Path(settings.output_file).with_suffix(".svg")
    try:
        if settings.output_file is not None:
            Path(settings.output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(settings.output_file).write_text(table + "\n", encoding="utf-8")
        if picture is not None:
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_text(flame_svg(root, title), encoding="utf-8")
    except OSError as error:
        log.warning("the profile could not be written: %s", error)
    if settings.output_file is None:
        log.info("%s%s", table, f"\n  picture: {picture}" if picture else "")
    else:
        log.info("%s: see %s", title, settings.output_file)
