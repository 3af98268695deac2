"""Rewrites of a user's model: one object for each, in the order in which `initialize` applies them.

[Note: Order of rewrites]
Layers are cut over stages first where a model is a list of them. A model with one list of blocks is cut over tensor and
expert ranks while it is whole, and over stages afterwards. Only then do the parameters that this rank keeps go to the
device. Linear layers know by then whether ranks share them, and take their products in few bits. What wraps forward
functions follows: sequences, then tiles inside of them. The optimizer and ZeRO come last, because they see the
parameters that are left.
"""

from __future__ import annotations

from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.rewrites.compression import CompressedLayers
from polyaccel.torch.rewrites.cuts import ExpertParallel, MegatronCuts, TensorParallel
from polyaccel.torch.rewrites.engine import (
    ActivationCheckpointing,
    ExactGeneration,
    MatrixKernels,
    OptimizerShards,
    ProgressiveLayerDrop,
    ZeroShards,
)
from polyaccel.torch.rewrites.forwards import BufferTypes, SequenceParallel, TiledCompute
from polyaccel.torch.rewrites.low_precision import LowPrecisionLayers
from polyaccel.torch.rewrites.placement import DevicePlacement, ReadyModel
from polyaccel.torch.rewrites.quantized import QuantizedWeights
from polyaccel.torch.rewrites.stages import PipelineBlocks, PipelineLayers

__all__ = ["REWRITES", "AppliedRewrite", "Rewrite", "RewriteContext"]

REWRITES: tuple[Rewrite, ...] = (
    CompressedLayers(),
    PipelineLayers(),
    QuantizedWeights(),
    ReadyModel(),
    MegatronCuts(),
    TensorParallel(),
    ExpertParallel(),
    PipelineBlocks(),
    LowPrecisionLayers(),
    DevicePlacement(),
    BufferTypes(),
    SequenceParallel(),
    TiledCompute(),
    OptimizerShards(),
    ZeroShards(),
    MatrixKernels(),
    ActivationCheckpointing(),
    ProgressiveLayerDrop(),
    ExactGeneration(),
)
"""Every rewrite, in the order in which they are applied. See [Note: Order of rewrites]."""
