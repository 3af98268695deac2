"""A table's stages over time as an SVG picture."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from polyaccel.pipeline.table import PipelineOp, PipelineTable
from polyaccel.pipeline.timing import OpTimes, PipelineTiming, simulate

_ROW, _BAR, _LEFT, _TOP, _FOOT = 26, 22, 72, 30, 30
_LEAST_TEXT = 12.0
"""Width of a task in which its micro-batch can be read."""
_COLOURS = {
    PipelineOp.FORWARD: ("forward", "#4f83cc", "#9dbbe5"),
    PipelineOp.BACKWARD: ("backward", "#d9822b", "#efc08d"),
    PipelineOp.BACKWARD_INPUT: ("backward, input", "#5ba55b", "#a9d3a9"),
    PipelineOp.BACKWARD_WEIGHT: ("backward, weight", "#b0659c", "#ddb5d2"),
}
"""Name and colours of an operation: on a stage's first chunk, and paler on its later ones."""


def to_svg(timing: PipelineTiming, width: int = 1200) -> str:
    """An SVG document of `width` pixels: a row a stage, a bar a task with the number of its micro-batch."""
    table, scale = timing.table, (width - _LEFT - 10) / timing.makespan
    height = _TOP + table.stages * _ROW + _FOOT
    title = (
        f"{table.name}: {table.stages} stages, {table.micro_batches} micro-batches, makespan {timing.makespan:g}, "
        f"bubble {100 * timing.bubble_share:.1f} %"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="19" font-size="13">{escape(title)}</text>',
    ]
    for stage in range(table.stages):
        lines += _row(timing, stage, _TOP + stage * _ROW, scale)
    lines += [*_legend(timing, height - 10), "</svg>", ""]
    return "\n".join(lines)


def estimated_picture(table: PipelineTable) -> str:
    """`to_svg` a table whose chunks take equally long, and whose messages no time."""
    return to_svg(simulate(table, OpTimes.even(table.chunks)))


def _row(timing: PipelineTiming, stage: int, top: int, scale: float) -> list[str]:
    table = timing.table
    first = min(chunk for chunk, at in enumerate(table.placement) if at == stage)
    bars: dict[tuple[PipelineOp, bool], list[str]] = defaultdict(list)
    texts = []
    for task, begin, end in zip(table.tasks[stage], timing.starts[stage], timing.ends[stage], strict=True):
        left, length = _LEFT + begin * scale, (end - begin) * scale
        bars[task.op, task.chunk == first].append(f"M{left:.2f} {top}h{length:.2f}v{_BAR}h-{length:.2f}z")
        if length >= _LEAST_TEXT:
            texts.append(
                f'<text x="{left + length / 2:.2f}" y="{top + 15}" text-anchor="middle">{task.micro_batch}</text>'
            )
    lines = [f'<text x="8" y="{top + 15}">stage {stage}</text>']
    for (op, is_first), path in bars.items():
        colour = _COLOURS[op][1 if is_first else 2]
        lines.append(f'<path fill="{colour}" stroke="white" stroke-width="0.5" d="{"".join(path)}"/>')
    return lines + texts


def _legend(timing: PipelineTiming, bottom: int) -> list[str]:
    lines, left = [], _LEFT
    several = len(timing.table.placement) > timing.table.stages
    for op in sorted({task.op for tasks in timing.table.tasks for task in tasks}):
        name, *shades = _COLOURS[op]
        for shade in shades[: 2 if several else 1]:
            lines.append(f'<rect x="{left}" y="{bottom - 10}" width="12" height="12" fill="{shade}"/>')
            left += 16
        lines.append(f'<text x="{left}" y="{bottom}">{name}</text>')
        left += 14 + 7 * len(name)
    if several:
        lines.append(f'<text x="{left}" y="{bottom}">paler: later chunks</text>')
    return lines
