"""`polyaccel plan CONFIG MODEL --ranks N`: what each rank will need, before anything is allocated; and
`polyaccel plan --pipeline SCHEDULE`: what each stage of a pipeline will do."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyaccel.cli.argument_types import non_negative, positive, whole_number
from polyaccel.cli.parser import add_hidden_aliases, describe
from polyaccel.errors import PolyaccelError

if TYPE_CHECKING:
    from polyaccel.config import ResolvedConfig
    from polyaccel.core.mesh import Mesh
    from polyaccel.planner.forecast import Forecast
    from polyaccel.planner.model import ModelShape
    from polyaccel.planner.plan import TrainingPlan

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_count = whole_number("a number of 1 or more", 1)
_seconds = positive("a number of seconds above 0")
_time = non_negative("a time of 0 or more")

_DESCRIPTION = """\
Print what every rank needs to train MODEL with CONFIG on N ranks: memory, traffic of a step, and disk for a checkpoint,
for ZeRO stages 0 to 3 with and without offload. The first line is the best setting that fits --memory. A value that
CONFIG leaves open ("auto"), or that does not fit N, is assumed, and a line states it. --sequence-length adds the
activations of a language model of transformers. Where CONFIG has pipeline stages, the plan is one of each stage.
--pipeline, without CONFIG and MODEL, shows what each stage of a schedule does and how long it takes."""
_MODEL = """module:function (called without arguments on the meta device, returns a torch.nn.Module), a directory with a
Hugging Face config.json, a Hub id whose config.json is cached, or a number of parameters like 7e9 or 1.3B"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("plan", help="show what training will need, by setting", description=_DESCRIPTION)
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="path of the config, or base64 of its JSON")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL)
    ranks = parser.add_argument("-n", "--ranks", dest="world_size", type=int, metavar="N", help="ranks that will train")
    add_hidden_aliases(parser, ranks, ["--world-size"])
    for axis, what in (("tensor", "the weights of each layer"), ("sequence", "the sequences of a batch")):
        said = f"ranks that share {what}, where the config does not set them"
        parser.add_argument(f"--{axis}", type=int, metavar="N", help=said)
    limit = "for each rank, for example 16GiB"
    memory = parser.add_argument("--memory", type=parse_size, metavar="SIZE", help=f"memory of the device {limit}")
    add_hidden_aliases(parser, memory, ["--limit-device"])
    host = parser.add_argument("--host-memory", type=parse_size, metavar="SIZE", help=f"memory of the host {limit}")
    add_hidden_aliases(parser, host, ["--limit-host"])
    parser.add_argument(
        "--fit",
        nargs="?",
        const="",
        type=_size_of_fit,
        metavar="SIZE",
        help="order the stages, micro-batches, offloads, recomputation and meshes that fit --memory by the estimated "
        "seconds of a step, and state why the next does not fit",
    )
    parser.add_argument(
        "--comm",
        type=Path,
        metavar="FILE",
        help="speeds by `polyaccel comm bench --json FILE`: a column with the seconds of a step's collectives",
    )
    parser.add_argument(
        "--compute",
        type=_seconds,
        metavar="S",
        help="seconds that a step computes on a rank, without "
        "communication: with --comm, a column with the seconds of a step",
    )
    parser.add_argument(
        "--sequence-length",
        type=_count,
        metavar="S",
        help="tokens of a row of a micro-batch: estimate the activations of MODEL, a directory",
    )
    parser.add_argument("--batch", type=_count, metavar="B", help="rows of a micro-batch; without it the config's")
    parser.add_argument("--trials", type=Path, metavar="FOLDER", help="with --fit: what `polyaccel tune` found there")
    parser.add_argument("--all", action="store_true", help="show every table: bytes by purpose, traffic")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_pipeline(parser.add_argument_group("pipelines"))
    describe(
        parser,
        examples=(
            "polyaccel plan ds_config.json 1.3B --ranks 8 --memory 16GiB",
            "polyaccel plan ds_config.json path/to/model --ranks 8 --memory 80GiB --fit --sequence-length 4096",
            "polyaccel plan --pipeline zb-h1 --stages 4 --micro-batches 8",
        ),
        codes={1: "no setting fits, or an error, stated on standard error"},
        missing="give a config, a model and --ranks: polyaccel plan ds_config.json 1.3B --ranks 8",
        verbose="as --all, and the traceback of an error",
    )
    parser.set_defaults(func=run, print_usage=parser.print_usage)


def _add_pipeline(group: argparse._ArgumentGroup) -> None:
    said = (
        "a published schedule (gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, inference), or a CSV file of a table"
    )
    group.add_argument("--pipeline", metavar="SCHEDULE", help=said)
    for option, what in (
        ("--stages", "places in the pipeline"),
        ("--micro-batches", "parts of a batch that pass it one after the other"),
        ("--chunks", "parts of the model on each stage"),
    ):
        group.add_argument(option, type=int, metavar="N", help=what)
    group.add_argument(
        "--times",
        type=_times,
        default=(1.0, 1.0, 1.0),
        metavar="F,I,W",
        help="times of a chunk's forward pass, of the gradients of its input and of those of its parameters",
    )
    group.add_argument("--transfer", type=_time, default=0.0, metavar="T", help="time of a message between stages")
    group.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the stages over time")
    group.add_argument("--csv", type=Path, metavar="FILE", help="write the table, as a start for one of your own")


def parse_size(text: str) -> int:
    """Bytes from `16GiB`, `1.5T` or a plain number. Raises ArgumentTypeError, which argparse reports."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it as 16GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * 1024 ** _EXPONENTS[match[2].upper()])


def _size_of_fit(text: str) -> int:
    """The bytes of `--fit SIZE`; 0 for --fit alone. Text such as 1.3B is MODEL, and is refused."""
    if text and not text.isdecimal() and not re.search("[KMGT]", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16GiB")
    return parse_size(text) if text else 0


def _times(text: str) -> tuple[float, float, float]:
    parts = text.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not three times; write them as 1,1.2,0.9")
    forward, backward_input, backward_weight = map(_seconds, parts)
    return forward, backward_input, backward_weight


def _refused(args: argparse.Namespace, said: str) -> int:
    """The exit code of wrong arguments, which are reported as argparse reports them."""
    args.print_usage(sys.stderr)
    print(f"polyaccel plan: error: {said}", file=sys.stderr)
    return 2


def run(args: argparse.Namespace) -> int:
    """Print the plan. The exit code is 1 when limits were given and no setting fits them. Raises PolyaccelError."""
    if args.pipeline is not None:
        if args.config is not None:
            return _refused(args, "--pipeline takes no CONFIG and no MODEL")
        from polyaccel.cli.plan.pipeline import run_pipeline

        return run_pipeline(args)
    given = {"CONFIG": args.config, "MODEL": args.model, "--ranks": args.world_size}
    absent = [name for name, value in given.items() if value is None]
    if absent:
        return _refused(args, f"give {', '.join(absent)}: polyaccel plan ds_config.json 1.3B --ranks 8")
    args.memory = args.fit or args.memory
    if args.fit is not None and args.memory is None:
        return _refused(args, "--fit needs the memory of a device: --memory 16GiB")
    if args.trials is not None and args.fit is None:
        return _refused(args, "--trials is for --fit")
    if args.compute is not None and args.comm is None and args.fit is None:
        raise PolyaccelError(
            f"--compute {args.compute:g}, and the speed of collectives is unknown",
            hint="measure it: polyaccel comm bench --json FILE, then --comm FILE",
            value=args.compute,
        )
    from polyaccel.cli.plan.hub import model_folder
    from polyaccel.cli.plan.stages import estimated_activations
    from polyaccel.cli.plan.tables import print_plan
    from polyaccel.comm.benchmark import CollectiveTimings
    from polyaccel.config.meshes import mesh_of
    from polyaccel.planner.assumptions import planned_config
    from polyaccel.planner.plan import Limits, plan_training

    args.model = model_folder(args.model)
    asked = {"tensor": args.tensor, "sequence": args.sequence}
    planned = planned_config(args.config, args.world_size, {axis: size for axis, size in asked.items() if size})
    args.world_size = planned.world_size
    mesh = mesh_of(planned.config, args.world_size)
    if mesh.size_of(("pipe",)) > 1:
        from polyaccel.cli.plan.stages import run_stages

        return run_stages(args, planned)
    model = _model_shape(args.model, planned.config, mesh)
    if args.fit is not None:
        from polyaccel.cli.plan.fit import run_fit

        return run_fit(args, planned, model)
    plan = plan_training(
        planned,
        model,
        args.world_size,
        Limits(device_nbytes=args.memory, host_nbytes=args.host_memory),
        speeds=None if args.comm is None else CollectiveTimings.read(args.comm),
        compute_s=args.compute,
        activations=estimated_activations(args, planned.config),
    )
    if args.json:
        print(json.dumps(_as_json(plan), indent=2))
    else:
        print_plan(plan, shows_all=args.all or args.verbose)
    return 0 if plan.fitting else 1


def _model_shape(text: str, config: ResolvedConfig, mesh: Mesh) -> ModelShape:
    """Return the model that `MODEL` names, as a rank of `mesh` holds it. Only modules and directories need torch."""
    from polyaccel.core.types import DType
    from polyaccel.planner.model import parse_count, shape_of_count
    from polyaccel.planner.pass_settings import PassSettings

    settings = PassSettings.from_config(config, mesh)
    count = None if Path(text).is_dir() else parse_count(text)
    if count is not None and settings.expert_ranks > 1:
        raise PolyaccelError(
            f"nothing says how many of {text} parameters are those of experts, which {settings.expert_ranks} ranks "
            "share",
            hint="write my_package.model:build or a directory with a config.json",
            value=text,
        )
    if count is not None:
        return shape_of_count(count, settings.rules.param_dtype or DType.FLOAT32, settings.tensor_ranks)
    if ":" not in text and not Path(text).is_dir():
        raise PolyaccelError(
            f"expected a directory, a module:function, a Hub id or a number of parameters: {text}",
            hint="write my_package.model:build, a directory with a config.json, or 1.3B",
            value=text,
        )
    from polyaccel.torch.estimate.rank_share import rank_shape

    return rank_shape(text, settings)


def _as_json(plan: TrainingPlan) -> dict[str, Any]:
    """All figures; bytes and elements are of one rank, those of a checkpoint of all ranks together."""
    return {
        "model": {
            "summary": plan.model.summary,
            "numel": plan.model.numel,
            "trained_numel": plan.model.trained_numel,
            "buffer_nbytes": plan.model.buffer_nbytes,
        },
        "world_size": plan.world_size,
        "assumptions": list(plan.assumptions),
        "limits": asdict(plan.limits),
        "checkpoint_nbytes": plan.checkpoint_nbytes,
        "copies_of_state": asdict(plan.copies),
        "activations": [asdict(activation) for activation in plan.activations],
        "settings": [_setting_as_json(forecast, plan) for forecast in plan.forecasts],
        "fitting": [asdict(forecast.setting) for forecast in plan.fitting],
    }


def _setting_as_json(forecast: Forecast, plan: TrainingPlan) -> dict[str, Any]:
    from polyaccel.zero.plan.placement import Place

    memory: dict[str, dict[str, int]] = {place.value: {} for place in Place}
    for row in forecast.memory.rows:
        memory[row.place.value][row.purpose.value] = row.nbytes
    return {
        **asdict(forecast.setting),
        "is_own": forecast.is_own,
        "fits": forecast in plan.fitting,
        "memory_nbytes": memory,
        "peak_nbytes": {place.value: forecast.memory.peak_nbytes(place) for place in Place},
        "traffic": {**asdict(forecast.traffic), "total_numel": forecast.traffic.total_numel},
        "comm_s": forecast.comm_s,
        "step_s": plan.step_s(forecast),
    }
