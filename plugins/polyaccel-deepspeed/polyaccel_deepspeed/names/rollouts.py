"""The names of DeepSpeed's rollouts: modules below `deepspeed.runtime.rollout`."""

from __future__ import annotations

from polyaccel_deepspeed.names.entry import Module, yes

_HOME = "polyaccel_deepspeed.rollouts"
_BASE = yes(_HOME, "RolloutBatch", "RolloutConfig", "RolloutEngine", "RolloutRequest", "SamplingConfig")
_HYBRID = yes(_HOME, "HybridEngineRollout")
_LOSSES = yes("polyaccel_deepspeed.distillation", "JSDLossOutput", "ResponseTokenBatch", "generalized_jsd_loss")

ROLLOUTS: dict[str, Module] = {
    "deepspeed.runtime.rollout": Module(
        "Sequences of the model that is trained.", _BASE | _HYBRID | _LOSSES | yes(_HOME, "build_rollout")
    ),
    "deepspeed.runtime.rollout.base": Module("What is asked for and what comes.", _BASE),
    "deepspeed.runtime.rollout.hybrid_engine_rollout": Module(
        "Sequences of a training engine.", _HYBRID | yes(_HOME, "HybridEngineRolloutConfig")
    ),
    "deepspeed.runtime.rollout.opsd": Module("Losses of distillation.", _LOSSES),
}
