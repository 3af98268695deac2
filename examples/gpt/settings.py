"""What makes a run what it is: fixed when it begins, and taken from its folder when it is resumed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model import SHAPES
from run_dir import RunFolder, choose_folder

import polyaccel
from polyaccel import PolyaccelError

_CPUINFO = Path("/proc/cpuinfo")
_FAST_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Settings:
    """A run's settings. `precision` is fp32, bf16 or fp16; `config` is the JSON with its "auto" decided."""

    size: str
    steps: int
    seed: int
    eval_windows: int
    precision: str
    config: dict[str, Any]

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Settings:
        """Raises PolyaccelError when there is no such file."""
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise PolyaccelError(f"{file.parent} is not a run", hint="name one that has been started") from None

    @classmethod
    def begin(cls, args: argparse.Namespace) -> Settings:
        """The settings that the command line asks for, defaults filled in."""
        written = json.loads((args.config or _HERE / "config.json").read_text(encoding="utf-8"))
        precision = _choose_precision(written, args.precision)
        steps = args.steps or 350
        decided = {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 20), "enabled": precision == "bf16"}
        config = _without_auto(written, decided)
        return cls(
            size=args.size or "small",
            steps=steps,
            seed=1 if args.seed is None else args.seed,
            eval_windows=args.eval_windows or 96,
            precision=precision,
            config=config,
        )

    def check_same(self, args: argparse.Namespace) -> None:
        """Raise PolyaccelError for what the command line asks for and a resumed run cannot have."""
        asked = {name: getattr(args, name) for name in ("size", "steps", "seed", "eval_windows")}
        asked["precision"] = None if args.precision == "auto" else args.precision
        if args.config is not None:
            asked["config"] = Settings.begin(argparse.Namespace(**{**vars(args), "steps": self.steps})).config
        other = {name: value for name, value in asked.items() if value is not None and value != getattr(self, name)}
        if other:
            told = ", ".join(
                f"--{name.replace('_', '-')} {value} (it has {getattr(self, name)})" for name, value in other.items()
            )
            hint = "leave these out, or start a new run"
            raise PolyaccelError(f"a resumed run continues exactly and cannot change {told}", hint=hint, value=other)


def begin_run(
    args: argparse.Namespace, broadcast: Callable[[Any], Any], *, is_first: bool
) -> tuple[RunFolder, Settings]:
    """The run's folder and settings, the same on all ranks: the first one decides, and `broadcast` tells the others."""
    chosen: dict[str, Any] = {}
    if is_first:
        try:
            folder = choose_folder(args.runs, args.name, resume=args.resume)
            if args.resume:
                settings = Settings.load(folder.settings)
                settings.check_same(args)
            else:
                settings = Settings.begin(args)
                folder.path.mkdir(parents=True, exist_ok=True)
                settings.save(folder.settings)
            chosen = {"folder": str(folder.path), "settings": asdict(settings)}
        except (PolyaccelError, OSError) as error:
            chosen = {"error": str(error)}
    chosen = broadcast(chosen)
    if "error" in chosen:
        raise PolyaccelError(chosen["error"])
    return RunFolder(Path(chosen["folder"])), Settings(**chosen["settings"])


def has_fast_bf16() -> bool:
    """Whether the accelerator multiplies bf16 faster than fp32: a CPU only with instructions for it."""
    accelerator = polyaccel.get_accelerator()
    if accelerator.name != "cpu":
        return accelerator.is_bf16_supported()
    if not _CPUINFO.exists():
        return False
    flags = next((line for line in _CPUINFO.read_text().splitlines() if line.startswith("flags")), "")
    return not _FAST_BF16_FLAGS.isdisjoint(flags.split())


def _choose_precision(written: Mapping[str, Any], asked: str | None) -> str:
    """fp32, bf16 or fp16. It is the config's own decision unless bf16.enabled is "auto" there."""
    enabled = {name: written.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")}
    if enabled["bf16"] == "auto":
        return asked if asked in ("fp32", "bf16") else "bf16" if has_fast_bf16() else "fp32"
    chosen = next((name for name, is_on in enabled.items() if is_on), "fp32")
    if asked not in (None, "auto", chosen):
        hint = 'set bf16.enabled to "auto" in the config, or leave --precision out'
        raise PolyaccelError(f"--precision {asked}, but the config says {chosen}", hint=hint, value=asked)
    return chosen


def _without_auto(tree: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with each "auto" replaced by what was `decided` for its key; those of other keys are the engine's."""
    return {
        key: _without_auto(value, decided)
        if isinstance(value, Mapping)
        else decided.get(key, value)
        if value == "auto"
        else value
        for key, value in tree.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that make a run. None: not given."""
    parser.add_argument("--size", choices=SHAPES, help="the model (default: small, 10.8 M parameters)")
    parser.add_argument("--steps", type=_count, metavar="N", help="optimizer steps (default: 350)")
    parser.add_argument("--eval-windows", type=_count, metavar="N", help="sequences to validate on (default: 96)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the initial parameters (default: 1)")
    parser.add_argument(
        "--precision", choices=["auto", "fp32", "bf16"], help="auto (the default): bf16 where it is fast"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the JSON config (default: config.json beside this)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)
