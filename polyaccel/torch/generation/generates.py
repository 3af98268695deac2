"""`engine.generate`: the module's own `generate`, run by an engine that trains it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from logging import getLogger
from typing import Any

import torch
from torch import nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.comm.base import Communicator
from polyaccel.core.mesh import Mesh
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import PolyaccelError
from polyaccel.observability.metrics import MetricSink
from polyaccel.observability.timing import OUTSIDE, PhaseTimer
from polyaccel.torch.checkpoint.offload_states import empty_cache
from polyaccel.torch.data import cast_floats
from polyaccel.torch.generation.adapters import fused_adapters
from polyaccel.torch.generation.decode.fast import generate as decoded
from polyaccel.torch.generation.decode.prompts import is_list, padded, separated
from polyaccel.torch.generation.exact_proof import ComparedRollout, ComparedRollouts, require_fixed_positions
from polyaccel.torch.generation.lengths import cache_nbytes, require_length
from polyaccel.torch.generation.rollout import Rollout, RolloutTimes
from polyaccel.torch.settings import ModuleSettings
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.zero.engine import ZeroEngine

log = getLogger(__name__)
_OF_ONE_PASS = ("sequence", "expert")
"""Axes whose ranks exchange tokens inside the module's own passes."""


class Generates:
    """The part of an engine that generates."""

    zero: ZeroEngine
    adapter: TorchAdapter
    accelerator: Accelerator
    mesh: Mesh
    timer: PhaseTimer
    runtime: EngineBuilder
    _module_settings: ModuleSettings
    _autocast: Callable[[], AbstractContextManager[Any]]
    monitor: MetricSink
    _compared_rollouts: ComparedRollouts | None = None
    rollout_times: RolloutTimes | None = None
    """How long the last `generate` took on this rank; None before it."""

    @property
    @abstractmethod
    def global_steps(self) -> int:
        """Updates since the start."""

    @property
    @abstractmethod
    def _own_module(self) -> nn.Module:
        """The user's module."""

    def generate(
        self,
        *inputs: Any,
        seed: int | None = None,
        fuse_adapters: bool = False,
        batch_size: int | None = None,
        own_decoder: bool = True,
        **named: Any,
    ) -> Any:
        """Run the module's `generate` with the weights of this step, in evaluation mode and without gradients.

        Models that `torch.generation.decode` knows are decoded by it, with the tokens of the module's `generate`.

        Collective if parameters are sharded. Ranks may have other prompts and end at other tokens. Training mode and
        gradients are as before when it returns or raises.

        Args:
            *inputs: Arguments of the module's `generate`, in transformers the prompts. These may be a list of token
                sequences of uneven lengths.
            seed: Draw samples from the generators at this seed, and restore them; ranks with the same seed and the same
                prompts draw the same tokens. None draws from this rank's generators as they are.
            fuse_adapters: Add LoRA adapters of PEFT to their base weights meanwhile, which is faster and rounds
                otherwise. It has no effect where sharded parameters are gathered unit by unit.
            batch_size: Sequences that are decoded at a time: where one has ended, the next prompt takes its place. None
                decodes all together.
            own_decoder: Decode known models by the decoder of this package; False always runs the module's own method.
            **named: Named arguments of the module's `generate`.

        Returns:
            What the module's `generate` returns; for a list of prompts a list of their sequences, without padding.

        Raises:
            PolyaccelError: The module has no `generate`, is spread over pipeline stages, or may generate more than
                `hybrid_engine.max_out_tokens`. Under `generation.exact`, logits are not those of training. On the
                other ranks if it fails on one, where parameters are sharded.
            ShardingError: Generation changed a parameter, or ranks have different values of one.

        Example:
            ```python
            tokens = engine.generate(prompts, max_new_tokens=32, do_sample=False)
            ```
        """
        module, policy = self._own_module, self._module_settings.generation
        if self.mesh.has_several("pipe"):
            stages = self.mesh.size_of(("pipe",))
            raise PolyaccelError(f"no generation by {stages} pipeline stages", hint="use ZeRO-3", value=stages)
        if not callable(getattr(module, "generate", None)):
            kind = type(module).__name__
            raise PolyaccelError(
                f"{kind} has no generate", hint="give it one, as transformers' models have", value=kind
            )
        if fuse_adapters and policy.is_exact:
            hint = "leave fuse_adapters out: fused weights round otherwise than adapters in training"
            raise PolyaccelError("fused adapters under generation.exact", hint=hint, value=fuse_adapters)
        mask = None
        if inputs and is_list(inputs[0]):
            ids, mask = padded(inputs[0], module, named)
            inputs, named = (ids, *inputs[1:]), {**named, "attention_mask": mask}
        if self.runtime.casts_inputs:
            inputs, named = cast_floats((inputs, named), torch.float16)
        if hasattr(module, "generation_config"):
            # [Note: Rollouts unit by unit] needs no idle passes of transformers.
            named.setdefault("synced_gpus", False)

        def generate(is_whole: bool) -> Any:
            if policy.max_tokens is not None:
                require_length(module, inputs, named, policy.max_tokens)
            draws = seeded(self.accelerator, seed, self._tensor_ranks())
            fused = fused_adapters(module) if fuse_adapters and is_whole else nullcontext()
            with evaluating(module), draws, torch.no_grad(), self._autocast(), fused:
                if policy.is_exact:
                    return self._generate_exactly(module, inputs, named)
                if not own_decoder or not is_whole or any(map(self.mesh.has_several, _OF_ONE_PASS)):
                    return module.generate(*inputs, **named)  # type: ignore[operator]
                kernels = self.accelerator.decode_kernels()
                return decoded(module, kernels, inputs, named, seed=seed, batch_size=batch_size)

        cache = self._cache_nbytes(module, inputs, named, batch_size)
        with self.timer(OUTSIDE):
            output = self._roll_out(generate, cache)
            if policy.empties_cache:
                empty_cache(torch_device_of(self.accelerator))
        return output if mask is None else separated(output, mask, module, named)

    def _generate_exactly(self, module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what the module's `generate` returns, compared with a pass over the whole sequences where that is
        needed. See [Note: Compared rollouts]."""
        require_fixed_positions(module)
        rollout = ComparedRollout(module, inputs, named)
        if not rollout.is_possible:
            log.warning("this rollout is not compared with training: it has beams, an encoder or another generate")
            return module.generate(*inputs, **named)  # type: ignore[operator]
        known = self._compared_rollouts = self._compared_rollouts or ComparedRollouts()
        if known.includes(rollout):
            return module.generate(*inputs, **named)  # type: ignore[operator]
        output = module.generate(*inputs, **rollout.arguments)  # type: ignore[operator]
        rollout.require_equal(output)
        known.add(rollout)
        return rollout.as_asked(output)

    def _roll_out(self, generate: Callable[[bool], Any], cache_nbytes: int) -> Any:
        """Run `generate` with the weights of this step; its argument is whether all of them are whole."""
        rollout = Rollout(self.zero, self.adapter, self._module_settings.generation, cache_nbytes)
        output = rollout.run(generate)
        self.rollout_times = times = rollout.times
        if self.monitor.enabled:
            figures = {"rollout/hand_over_s": times.hand_over_s, "rollout/generate_s": times.generate_s}
            self.monitor.write_events([(tag, value, self.global_steps) for tag, value in figures.items()])
        return output

    def _cache_nbytes(
        self, module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], batch_size: int | None
    ) -> int:
        """The bytes of keys and values that this rank keeps in a rollout."""
        dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
        whole = cache_nbytes(module, inputs, named, batch_size=batch_size, dtype=dtype)
        return whole // self.mesh.size_of(("tensor",))

    def _tensor_ranks(self) -> Communicator | None:
        """The ranks that share each layer with this one, which must draw the same tokens; None without others."""
        return self.runtime.process_group_for(("tensor",)) if self.mesh.has_several("tensor") else None


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and back to what each part of `module` had."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        module.train(modes[module])
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def seeded(accelerator: Accelerator, seed: int | None, together: Communicator | None = None) -> Iterator[None]:
    """Let torch's generators begin at `seed` and restore them. None leaves them alone, except where ranks draw
    `together`: those follow the first of them. Collective there."""
    state = None if together is None else together.broadcast_object(accelerator.rng_state())
    if seed is None and (together is None or together.rank == 0):
        yield
        return
    before = accelerator.rng_state()
    if seed is not None:
        torch.manual_seed(seed)
    elif state is not None:
        accelerator.set_rng_state(state)
    try:
        yield
    finally:
        accelerator.set_rng_state(before)
