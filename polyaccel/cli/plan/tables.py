"""The tables of `polyaccel plan`, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from polyaccel.config.meshes import mesh_of
from polyaccel.engine.policies.muon import MUON
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.planner.forecast import SETTINGS, Forecast
from polyaccel.planner.optimizer_needs import ASSUMED_STATES
from polyaccel.planner.plan import TrainingPlan
from polyaccel.utils.sizes import size
from polyaccel.zero.plan.memory import Purpose
from polyaccel.zero.plan.placement import Place

WIDTH = 80
UNITS = "K, M, G: KiB, MiB, GiB"
"""What the letters of `short_bytes` stand for."""
_COLUMNS = (
    ("params", (Purpose.PARAMS,)),
    ("master", (Purpose.MASTER,)),
    ("states", (Purpose.OPTIM,)),
    ("grads", (Purpose.GRADS,)),
    ("moving", (Purpose.GRADS_IN_FLIGHT, Purpose.GRAD_OUTSIDE, Purpose.STAGING)),
    ("gathered", (Purpose.GATHERED, Purpose.SECOND, Purpose.CODES)),
    ("peak", tuple(Purpose)),
)
_SENDERS = tuple(setting for setting in SETTINGS if not any(setting.offloaded))
"""One setting a stage: offload sends nothing to other ranks."""
_WORDS = ("stage", "offload", "place", "activations", "blocks", "setting")
"""Columns that have no figures."""
_LEGEND = (
    "offload: where optimizer states stand and, after the slash, where sharded parameters rest. "
    "params, master, states, grads: parameters, master weights, optimizer states and gradients, there all the time. "
    "moving: gradient buckets in flight and one gradient outside; on the host, what offloaded states pass through. "
    "gathered: the bound on sharded parameters that are whole at once. peak: all of it together. "
    "Activations and the framework's own memory are not included."
)


def print_plan(plan: TrainingPlan, *, shows_all: bool) -> None:
    """Write the plan to standard output: the verdict, what was assumed, and the settings that fit; with `shows_all` the
    bytes by purpose and the traffic too."""
    parts: list[Text | Group] = [_verdict(plan), _head(plan), *_assumed(plan), *_fit(plan), *_activation_table(plan)]
    if shows_all:
        parts += [_memory_table(plan), Text(_LEGEND), _traffic_table(plan)]
    else:
        parts.append(Text("--all shows the bytes of every setting by purpose, and the traffic of a step."))
    print_parts([*parts, *_notes(plan)])


def _verdict(plan: TrainingPlan) -> Text:
    """The best setting that fits, and whether the config's own does; without limits what its own needs."""
    limits = {"device": plan.limits.device_nbytes, "host": plan.limits.host_nbytes}
    stated = " and ".join(f"{size(limit)} of {place}" for place, limit in limits.items() if limit is not None)
    own = next((forecast for forecast in plan.forecasts if forecast.is_own), None)
    counted = "activations too" if plan.activations else "activations not counted"
    if stated and not plan.fitting:
        verdict = f"No setting fits {stated} memory. Use more ranks or a smaller model."
        return Text(f"{verdict} {_own_need(own, 'This config')}" if own else verdict, style="bold")
    if not stated:
        return Text(f"{_own_need(own, 'This config')} ({counted})." if own else "No limit is given.", style="bold")
    best = plan.fitting[0]
    verdict = _own_need(best, f"Best of {len(plan.fitting)} settings that fit {stated} memory")
    if best is own:
        mine = "It is this config's."
    elif own in plan.fitting:
        mine = "This config's setting fits too."
    else:
        mine = f"{_own_need(own, 'This config')}, and does not fit." if own else ""
    return Text(f"{verdict} ({counted}). {mine}".rstrip(), style="bold")


def _own_need(forecast: Forecast, subject: str) -> str:
    setting = forecast.setting
    offload = "no offload" if setting.offload == setting.offload_param == "none" else f"offload {_offload(forecast)}"
    host = forecast.memory.peak_nbytes(Place.HOST)
    needs = f"{size(forecast.memory.peak_nbytes(Place.DEVICE))} of the device"
    return f"{subject}: stage {setting.stage}, {offload}, {needs}" + (f", {size(host)} of the host" if host else "")


def print_parts(parts: Iterable[Text | Group | Table]) -> None:
    """Write them to standard output, each with an empty line behind it; into a file 80 columns wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for part in parts:
        console.print(part)
        console.print()


def short_bytes(nbytes: int) -> str:
    """Three digits and a unit of 1024: `1.53G`; `-` for none."""
    return _short(nbytes, 1024, ("", "K", "M", "G"))


def short_count(numel: int) -> str:
    """Three digits and a unit of 1000, as people count parameters: `1.53B`; `-` for none."""
    return _short(numel, 1000, ("", "K", "M", "B"))


def _short(number: int, base: int, units: Sequence[str]) -> str:
    """`T` stands above the last unit."""
    value, passed = float(number), 0
    while value >= 999.5 and passed < len(units):
        value /= base
        passed += 1
    decimals = 0 if not passed or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}{(*units, 'T')[passed]}" if number else "-"


def _head(plan: TrainingPlan) -> Text:
    model = plan.model
    frozen = model.numel - model.trained_numel
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    axes = mesh_of(plan.config, plan.world_size).axes
    if len(axes) > 1:
        ranks += f" ({' x '.join(f'{axis.name} {axis.size}' for axis in axes)})"
    counted = f"{short_count(model.numel)} parameters" + (f", {short_count(frozen)} of them frozen" if frozen else "")
    disk = size(plan.checkpoint_nbytes)
    kept = []
    if plan.copies.staging_nbytes:
        kept.append(f"{size(plan.copies.staging_nbytes)} while a checkpoint is written next to training")
    if plan.copies.replica_nbytes:
        kept.append(f"{size(plan.copies.replica_nbytes)} for replicas, twice that on several hosts")
    text = f"{model.summary}: {counted}; {ranks}. A checkpoint takes {disk} of disk, all ranks together."
    return Text(f"{text} Not in the tables, in a rank's host memory: {' and '.join(kept)}." if kept else text)


def _assumed(plan: TrainingPlan) -> list[Text]:
    return [Text("\n".join(f"Assumed: {sentence}." for sentence in plan.assumptions))] if plan.assumptions else []


def _memory_table(plan: TrainingPlan) -> Group:
    table = column_table("stage", "offload", "place", *(name for name, _ in _COLUMNS))
    for forecast in plan.forecasts:
        names: tuple[str, str] = (_stage(forecast), _offload(forecast))
        for place in Place:
            nbytes = {row.purpose: row.nbytes for row in forecast.memory.rows if row.place is place}
            if any(nbytes.values()):
                sums = (sum(nbytes.get(purpose, 0) for purpose in purposes) for _, purposes in _COLUMNS)
                table.add_row(*names, place.value, *map(short_bytes, sums))
                names = ("", "")
    return titled(f"Memory of one rank (* this config; {UNITS})", table)


def _activation_table(plan: TrainingPlan) -> list[Group]:
    if not plan.activations:
        return []
    table = column_table("activations", "after forward", "peak")
    for activation in plan.activations:
        name = f"{activation.way}{'*' if activation.is_own else ''}"
        table.add_row(name, short_bytes(activation.kept_nbytes), short_bytes(activation.peak_nbytes))
    return [titled(f"Memory of one micro-batch on one rank (* this config; {UNITS})", table)]


def _traffic_table(plan: TrainingPlan) -> Group:
    table = column_table("stage", "all-reduce", "reduce-scatter", "all-gather", "all", "bytes")
    for forecast in plan.forecasts:
        if forecast.setting in _SENDERS:
            sent = forecast.traffic
            counts = (sent.all_reduce_numel, sent.reduce_scatter_numel, sent.all_gather_numel, sent.total_numel)
            table.add_row(str(forecast.setting.stage), *map(short_count, counts), short_bytes(sent.total_nbytes))
    return titled("Sent by one rank in one step", table)


def _fit(plan: TrainingPlan) -> list[Group]:
    if not plan.fitting:
        return []
    order = "cheapest in traffic first" if plan.speeds is None else "fastest communication first"
    has_limit = plan.limits.device_nbytes is not None or plan.limits.host_nbytes is not None
    title = f"{'Fits, ' if has_limit else ''}{order} (* this config; {UNITS})"
    times = [] if plan.speeds is None else ["comm s"] if plan.compute_s is None else ["comm s", "step s"]
    table = column_table("stage", "offload", "sent", *times, "device", "host", "nvme")
    for forecast in plan.fitting:
        peaks = (forecast.memory.peak_nbytes(place) for place in Place)
        sent = short_bytes(forecast.traffic.total_nbytes)
        seconds = (f"{value:.3g}" for value in (forecast.comm_s, plan.step_s(forecast)) if value is not None)
        table.add_row(_stage(forecast), _offload(forecast), sent, *seconds, *map(short_bytes, peaks))
    return [titled(title[0].upper() + title[1:], table)]


def _notes(plan: TrainingPlan) -> list[Text]:
    return [*_note_on_times(plan), *_note_on_optimizer(plan)]


def _note_on_times(plan: TrainingPlan) -> list[Text]:
    speeds = plan.speeds
    if speeds is None:
        return []
    where = f"{speeds.world_size} ranks on {len(speeds.ranks_on_hosts)} hosts by {speeds.backend}, {speeds.date}"
    other = "" if speeds.world_size == plan.world_size else f"; bus bandwidths are taken to hold for {plan.world_size}"
    step = "" if plan.compute_s is None else " step: computing and communication, one after the other."
    return [Text(f"comm: seconds of a step's collectives, none overlapped, as measured on {where}{other}.{step}")]


def _note_on_optimizer(plan: TrainingPlan) -> list[Text]:
    optimizer = plan.config.optimizer
    if optimizer is not None and optimizer.type in (*OPTIMIZERS, MUON):
        return []
    named = "names no optimizer" if optimizer is None else f"names {optimizer.type}"
    count = len(ASSUMED_STATES)
    return [
        Text(
            f"The config {named}: {count} states a parameter are assumed, as of Adam. "
            "Offload to nvme needs an optimizer of ours."
        )
    ]


def _stage(forecast: Forecast) -> str:
    return f"{forecast.setting.stage}{'*' if forecast.is_own else ''}"


def _offload(forecast: Forecast) -> str:
    setting = forecast.setting
    return setting.offload if setting.offload_param == "none" else f"{setting.offload}/{setting.offload_param}"


def column_table(*columns: str) -> Table:
    """An empty table; figures stand on the right."""
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    return table


def titled(title: str, table: Table) -> Group:
    """A table below its title."""
    return Group(Text(title, style="bold"), table)  # a table's own title wraps where the table ends
