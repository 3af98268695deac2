"""Models over the stages of a pipeline: their layers, and what stages send each other."""

from polyaccel.torch.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
