"""A profile as a picture: a row for each depth, in which a module is as wide as its share."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import floor
from zlib import crc32

from polyaccel.observability.profiles.table import shown
from polyaccel.observability.profiles.tree import ProfileNode

_WIDTH, _ROW, _HEAD = 1200, 22, 30
_CHAR = 6.6
"""About the width of a letter."""
_LEAST_WIDTH = 0.3
_STYLE = (
    "text{font:11px sans-serif;fill:#222}rect{stroke:#fff;stroke-width:.5}.bg{fill:#fff;stroke:none}.t{font-size:14px}"
    "@media(prefers-color-scheme:dark){.bg{fill:#161616}rect{stroke:#161616}.t{fill:#eee}}"
)


def flame_svg(root: ProfileNode, title: str) -> str:
    """An SVG file, without anything from elsewhere: widths are times where they were taken, else operations. The
    pointer on a module shows its figures."""
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
