"""DeepSpeed's constants of `deepspeed.runtime.config`: names of optimizers and of their arguments."""

from __future__ import annotations

ADAGRAD_OPTIMIZER = "adagrad"
ADAMW_OPTIMIZER = "adamw"
ADAM_OPTIMIZER = "adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True
EXPERT_PARALLEL = "expert_parallel"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUADAMW_OPTIMIZER = "muadamw"
MUADAM_OPTIMIZER = "muadam"
MUON_OPTIMIZER = "muon"
MUSGD_OPTIMIZER = "musgd"
TORCH_ADAM_PARAM = "torch_adam"
TENSOR_CORE_ALIGN_SIZE = 8
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUSGD_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
]
