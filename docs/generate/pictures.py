"""The drawings of the pages that explain: ZeRO stages, axes of a mesh, plugin groups, pipeline schedules.

`python docs/generate/pictures.py` renews docs/pictures/*.svg. Each has a light ground, so that it can be read on a dark
page too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyaccel.pipeline.render import to_svg
from polyaccel.pipeline.schedules import make_table
from polyaccel.pipeline.timing import OpTimes, simulate
from polyaccel.registry import PluginGroup

PICTURES = Path(__file__).parents[1] / "pictures"
_WIDTH = 760
_COLOURS = ("#3f51b5", "#00897b", "#bf5600", "#8e24aa")
_INK, _FAINT = "#212121", "#e0e0e0"


def _document(title: str, height: int, lines: Sequence[str]) -> str:
    """Return an SVG of these elements on a light card."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#fafafa"/>',
            f'<g font-family="sans-serif" font-size="17" fill="{_INK}">',
            *lines,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = _INK, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{weight}>{words}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str, *, line: str = "") -> str:
    stroke = f' stroke="{line}" stroke-width="1.5"' if line else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}"{stroke}/>'


def zero_stages() -> str:
    """Draw what each of four ranks holds at each stage: full blocks are whole, narrow ones a quarter."""
    kinds = ("parameters", "gradients", "optimizer states")
    lines = [_text(20 + 150 * index, 30, kind, colour=_COLOURS[index], bold=True) for index, kind in enumerate(kinds)]
    lines += [_text(164 + 150 * rank + 62, 58, f"rank {rank}", anchor="middle") for rank in range(4)]
    for stage in range(4):
        top = 72 + stage * 84
        lines.append(_text(20, top + 36, f"ZeRO stage {stage}", bold=True))
        for rank in range(4):
            left = 164 + 150 * rank
            for index in range(len(kinds)):
                is_sharded = stage >= len(kinds) - index
                lines.append(_box(left, top + 22 * index, 124, 18, _FAINT))
                width = 31 if is_sharded else 124
                lines.append(
                    _box(left + (31 * rank if is_sharded else 0), top + 22 * index, width, 18, _COLOURS[index])
                )
    return _document("What each of four ranks holds at ZeRO stages 0 to 3", 410, lines)


def mesh_axes() -> str:
    """Draw eight ranks of a mesh of two pipeline stages, two data ranks and two tensor ranks."""
    lines = [_text(20, 32, '"mesh": {"pipe": 2, "data": 2, "tensor": 2}, with ranks 0 to 7', bold=True)]
    for pipe in range(2):
        left = 40 + pipe * 360
        lines.append(_box(left, 56, 320, 236, "#ffffff", line=_COLOURS[0]))
        layers = ("first", "second")[pipe]
        lines.append(
            _text(left + 160, 80, f"pipe {pipe}: {layers} half of the layers", anchor="middle", colour=_COLOURS[0])
        )
        for data in range(2):
            top = 96 + data * 96
            lines.append(_box(left + 16, top, 288, 80, "#ffffff", line=_COLOURS[1]))
            lines.append(
                _text(left + 160, top + 20, f"data {data}: its own batch", anchor="middle", colour=_COLOURS[1])
            )
            for tensor in range(2):
                x = left + 28 + tensor * 136
                lines.append(_box(x, top + 30, 128, 40, _COLOURS[2]))
                rank = 4 * pipe + 2 * data + tensor
                lines.append(_text(x + 64, top + 55, f"{rank}: tensor {tensor}", anchor="middle", colour="#ffffff"))
    lines.append(_text(380, 180, "→", anchor="middle", bold=True))
    return _document("Eight ranks of a mesh with the axes pipe, data and tensor", 312, lines)


def plugin_groups() -> str:
    """Draw the engine with a socket for each group of plugins."""
    about = {
        PluginGroup.ACCELERATORS: ("a kind of device", "cpu, cuda, yours"),
        PluginGroup.COMM: ("how ranks exchange", "shm, gloo, nccl, mpi"),
        PluginGroup.TIERS: ("where states rest", "device, host, nvme"),
        PluginGroup.STORAGE: ("where checkpoints lie", "file, fsspec"),
        PluginGroup.LAUNCHERS: ("how ranks start", "ssh, slurm, an MPI"),
        PluginGroup.MONITORS: ("where figures go", "tensorboard, wandb"),
    }
    lines = [
        _box(20, 20, 720, 84, _COLOURS[0]),
        _text(380, 50, "polyaccel: one engine for PyTorch and JAX", anchor="middle", colour="#ffffff", bold=True),
        _text(380, 76, "config, ZeRO, meshes, pipelines, checkpoints", anchor="middle", colour="#ffffff"),
    ]
    for index, (group, (what, examples)) in enumerate(about.items()):
        left = 20 + index % 3 * 244
        top = 128 + index // 3 * 112
        lines.append(_box(left + 96, top - 24 if index < 3 else top - 8, 40, 24 if index < 3 else 8, _COLOURS[0]))
        lines.append(_box(left, top, 232, 92, "#ffffff", line=_COLOURS[1]))
        lines.append(_text(left + 116, top + 26, group.value, anchor="middle", colour=_COLOURS[1], bold=True))
        lines.append(_text(left + 116, top + 50, what, anchor="middle"))
        lines.append(_text(left + 116, top + 74, examples, anchor="middle", colour="#616161"))
    return _document("The engine and its six groups of plugins", 352, lines)


def tensor_ranks() -> str:
    """Draw a block of a transformer over two tensor ranks, without and with sharded sequences."""
    steps = (
        (("x (the same)", "x (the same)"), ""),
        (("q, k, v of heads 0 to 3", "q, k, v of heads 4 to 7"), "column: each its heads"),
        (("attention", "attention"), "dropout: other numbers"),
        (("o, inputs of heads 0 to 3", "o, inputs of heads 4 to 7"), "row"),
        (None, "all-reduce"),
        (("x + ... (the same)", "x + ... (the same)"), "dropout: the same numbers"),
        (("gate, up: features 0 to 18", "gate, up: features 19 to 36"), "column"),
        (("down", "down"), "row"),
        (None, "all-reduce"),
    )
    return _two_ranks("A block of a transformer over two tensor ranks", steps)


def sharded_sequence() -> str:
    """Draw the same block where each rank has some of the tokens between its layers."""
    steps = (
        (("tokens 0 to 127: norm", "tokens 128 to 255: norm"), "weights' gradients: added up"),
        (None, "all-gather of tokens"),
        (("attention, heads 0 to 3", "attention, heads 4 to 7"), ""),
        (None, "reduce-scatter of tokens"),
        (("tokens 0 to 127: x + ...", "tokens 128 to 255: x + ..."), "dropout: other numbers"),
    )
    return _two_ranks("A block over two tensor ranks, with sharded sequences", steps)


def _two_ranks(title: str, steps: Sequence[tuple[tuple[str, str] | None, str]]) -> str:
    lines = [_text(128, 30, "rank 0", anchor="middle", bold=True), _text(388, 30, "rank 1", anchor="middle", bold=True)]
    top = 42
    for both, note in steps:
        if both is None:
            lines += [
                _box(20, top, 476, 28, _COLOURS[2]),
                _text(258, top + 19, note, anchor="middle", colour="#ffffff"),
            ]
        else:
            for rank, words in enumerate(both):
                lines.append(_box(20 + 260 * rank, top, 216, 28, "#ffffff", line=_COLOURS[rank]))
                lines.append(_text(128 + 260 * rank, top + 19, words, anchor="middle"))
            lines.append(_text(514, top + 19, note, colour="#616161"))
        top += 38
    return _document(title, top + 10, lines)


def mark(colour: str) -> str:
    """Draw the logo: four shards of one square."""
    places = ((2, 2), (13, 2), (2, 13), (13, 13))
    shards = (f'<rect x="{x}" y="{y}" width="9" height="9" rx="2"/>' for x, y in places)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="{colour}">{"".join(shards)}</svg>\n'


def drawings() -> dict[str, str]:
    """Return the SVG of each file."""
    made = (zero_stages, mesh_axes, plugin_groups, tensor_ranks, sharded_sequence)
    found = {f"{draw.__name__}.svg": draw() for draw in made}
    found |= {"logo.svg": mark("#ffffff"), "icon.svg": mark(_COLOURS[0])}
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        table = make_table(schedule, stages=4, micro_batches=8)
        found[f"schedule_{schedule}.svg"] = to_svg(simulate(table, OpTimes.even(table.chunks)), _WIDTH)
    return found


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (PICTURES / name).write_text(drawing, encoding="utf-8")
