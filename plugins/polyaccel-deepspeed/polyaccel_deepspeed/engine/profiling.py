"""`deepspeed.profiling.flops_profiler`: DeepSpeed's names of the operation profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polyaccel.errors import PolyaccelError
from polyaccel.observability.profiles import ProfileNode, TableStyle, profile_table, shown
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.profiling.profiler import ModuleProfiler, inputs_of_shape, profile_module


class FlopsProfiler:
    """Counts and times the forward passes of `model` between `start_profile` and `stop_profile`, both at once: times
    are those of passes that are counted, which takes longer."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._numels = None
        if ds_engine is not None:  # parameters may be elsewhere
            self._numels = {spec.fqn: spec.numel for spec in ds_engine.adapter.param_specs()}
        self._profiler: ModuleProfiler | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Look from now on; what was seen before is forgotten."""
        self.end_profile()
        self._profiler = ModuleProfiler(self.model, self._numels, tuple(ignore_list or ()))
        self._profiler.start()
        self.started = True

    def stop_profile(self) -> None:
        """Look no more. What was seen stays."""
        if self._profiler is not None:
            self._profiler.stop()

    def reset_profile(self) -> None:
        """Forget what was seen."""
        if self._profiler is not None:
            self._profiler.reset()

    def end_profile(self) -> None:
        """Look no more, and forget what was seen."""
        self.stop_profile()
        self._profiler, self.started = None, False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the forward passes."""
        return _said(self._seen.operations, "FLOPs", as_string)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with their additions."""
        return _said(self._seen.macs, "MACs", as_string)

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forward passes."""
        seconds = self._seen.seconds or 0.0
        return f"{1e3 * seconds:.3g} ms" if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model."""
        return _said(self._seen.parameters or 0, "", as_string)

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """False: experts are whole, or cut like every layer."""
        return False

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the table of what was seen, or write it to `output_file`; the attributes `flops`, `macs` and `params`
        keep its totals."""
        self._keep_totals()
        style = TableStyle(depth=module_depth, top=top_modules, detailed=detailed, recomputed=self.recompute_fwd_factor)
        _tell(profile_table(self._seen, f"flops profile of step {profile_step}", style), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules with most operations at each depth."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)

    def _keep_totals(self) -> None:
        self.flops, self.macs, self.params = self.get_total_flops(), self.get_total_macs(), self.get_total_params()

    @property
    def _seen(self) -> ProfileNode:
        if self._profiler is None:
            raise PolyaccelError("nothing was profiled", hint="call start_profile before the forward pass")
        return self._profiler.profile()


class EngineProfiler(FlopsProfiler):
    """`engine.flops_profiler`. Where a script has not started it, it has what the section `flops_profiler` has seen."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine.module, engine)
        self._engine = engine

    def _keep_totals(self) -> None:
        pass  # they are properties

    @property
    def _seen(self) -> ProfileNode:
        if self._profiler is None and self._engine.profile is not None:
            return self._engine.profile
        return super()._seen

    @property
    def flops(self) -> Any:
        """Operations of the forward passes."""
        return self.get_total_flops()

    @property
    def macs(self) -> Any:
        """Multiplications with their additions."""
        return self.get_total_macs()

    @property
    def params(self) -> Any:
        """Parameters of the model."""
        return self.get_total_params()


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(FLOPs, MACs, parameters) of a forward pass, or of `model.generate` with `mode` "generate", of ones of
    `input_shape` or of `args` and `kwargs`; printed as a table with `print_profile`. The model is run `warm_up` + 2
    times."""
    given = [inputs_of_shape(model, input_shape)] if input_shape is not None else list(args)
    if mode not in ("forward", "generate"):
        raise PolyaccelError(f"mode {mode!r}", hint='use "forward" or "generate"', value=mode)
    call: Any = model if mode == "forward" else model.generate
    root = profile_module(
        model, lambda: call(*given, **(kwargs or {})), warm_up=warm_up, ignored=tuple(ignore_modules or ())
    )
    if print_profile:
        style = TableStyle(depth=module_depth, top=top_modules, detailed=detailed)
        _tell(profile_table(root, f"flops profile of {type(model).__name__}", style), output_file)
    flops, macs = _said(root.operations, "FLOPs", as_string), _said(root.macs, "MACs", as_string)
    return flops, macs, _said(root.parameters or 0, "", as_string)


def _said(number: float, unit: str, as_string: bool) -> Any:
    return shown(number, unit) if as_string else number


def _tell(text: str, output_file: str | None) -> None:
    if output_file is None:
        print(text)
    else:
        Path(output_file).write_text(text + "\n", encoding="utf-8")
