"""A training of GPT-NeoX's shape: its calls of DeepSpeed's pipeline, with a small model and data of our own.

It runs over the real package and over the drop-in: `python neox_training.py FOLDER STAGES`, once a rank. The last stage
prints what came out as JSON, behind `RESULT`.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F  # noqa: N812 - as scripts have it
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import DeepSpeedEngine, PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

VOCABULARY, WIDTH, LENGTH, LAYERS = 23, 12, 7, 3
STEPS, MICRO_BATCHES, ROWS = 3, 4, 2


class Mpu:
    """The groups that the script itself makes, as NeoX's `initialize_model_parallel` does."""

    def __init__(self, topology: Any) -> None:
        self.topology = topology
        self.place = topology.get_coord(torch.distributed.get_rank())
        for axis in ("pipe", "data", "model"):
            for ranks in topology.get_axis_comm_lists(axis):
                group = torch.distributed.new_group(ranks=ranks)
                if torch.distributed.get_rank() in ranks:
                    setattr(self, axis, group)

    def get_pipe_parallel_rank(self) -> int:
        return torch.distributed.get_rank(group=self.pipe)

    def get_pipe_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(group=self.pipe)

    def get_pipe_parallel_group(self) -> Any:
        return self.pipe

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank(group=self.data)


def filled(module: nn.Module, seed: int) -> None:
    """Values that depend on no generator that anything else draws from."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))


class EmbeddingPipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        filled(self, 1)

    @property
    def word_embeddings_weight(self) -> Any:
        return self.word_embeddings.weight

    def forward(self, args: Any) -> Any:
        assert len(args) == 3
        input_ids, position_ids, attention_mask = args
        return self.word_embeddings(input_ids) + self.position_embeddings(position_ids), attention_mask


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, *, layer_number: int, use_cache: bool) -> None:
        super().__init__()
        self.norm, self.layer_past, self.use_cache = nn.LayerNorm(WIDTH), None, use_cache
        self.attention, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        filled(self, 10 + layer_number)

    def forward(self, args: Any) -> Any:
        assert len(args) == 2
        hidden_states, attention_mask = args
        assert attention_mask.dtype is torch.bool
        query, key, value = self.attention(self.norm(hidden_states)).transpose(0, 1).chunk(3, -1)
        scores = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(attention_mask[0], -1e4)
        return hidden_states + self.dense((scores.softmax(-1) @ value).transpose(0, 1)), attention_mask


class NormPipe(nn.Module):
    def __init__(self, norm_class: Any, size: int) -> None:
        super().__init__()
        self.norm = norm_class(size)
        filled(self, 99)

    def forward(self, args: Any) -> Any:
        assert not isinstance(args, tuple)
        return self.norm(args)


def _pre_transformer_block(args: Any) -> Any:
    assert len(args) == 2
    return (args[0].transpose(0, 1).contiguous(), *args[1:])


def _post_transformer_block(args: Any) -> Any:
    assert len(args) == 2
    return args[0].transpose(0, 1).contiguous()


def cross_entropy(output: Any, labels: Any, _fp16: bool = False) -> Any:
    labels, loss_mask = labels[0], labels[1]
    losses = F.cross_entropy(output.float().flatten(0, 1), labels.flatten(), reduction="none")
    loss_mask = loss_mask.view(-1)
    return torch.sum(losses * loss_mask) / loss_mask.sum()


def recursive_setattr(layers: Any, name: str, value: Any) -> None:
    for layer in layers:
        for module in layer.modules() if isinstance(layer, nn.Module) else ():
            if hasattr(module, name):
                setattr(module, name, value)


class GPT2ModelPipe(PipelineModule, nn.Module):
    def __init__(self, neox_args: Namespace, topology: Any = None, use_cache: bool = False) -> None:
        self.neox_args = neox_args
        self.use_cache = use_cache
        self.__topology__ = topology
        self.specs: list[Any] = []
        self.init_specs()
        super().__init__(
            layers=self.specs,
            loss_fn=partial(cross_entropy, _fp16=False),
            topology=topology,
            activation_checkpoint_interval=neox_args.checkpoint_num_layers,
            partition_method=neox_args.pipe_partition_method,
            checkpointable_layers=["GMLPBlock", "ParallelTransformerLayerPipe"],
        )

    def init_specs(self) -> None:
        self.specs = [TiedLayerSpec("embed", EmbeddingPipe, tied_weight_attr="word_embeddings_weight")]
        self.specs.append(_pre_transformer_block)
        for number in range(LAYERS):
            spec = LayerSpec(ParallelTransformerLayerPipe, layer_number=number, use_cache=self.use_cache)
            self.specs.append(spec)
        self.specs.append(_post_transformer_block)
        self.specs.append(LayerSpec(NormPipe, nn.LayerNorm, WIDTH))

        def _logits_helper(embedding: Any, lm_output: Any) -> Any:
            return lm_output @ embedding.word_embeddings_weight.t()

        self.specs.append(
            TiedLayerSpec("embed", EmbeddingPipe, forward_fn=_logits_helper, tied_weight_attr="word_embeddings_weight")
        )

    def inference_mode(self, use_cache: bool = True) -> None:
        recursive_setattr(self.forward_funcs, "use_cache", use_cache)
        recursive_setattr(self.forward_funcs, "training", False)

    def train_mode(self) -> None:
        recursive_setattr(self.forward_funcs, "use_cache", False)
        recursive_setattr(self.forward_funcs, "training", True)

    def clear_cache(self) -> None:
        recursive_setattr(self.forward_funcs, "layer_past", None)


def get_batch_pipe(data: Any, neox_args: Namespace) -> Any:
    text = data["text"]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    length = tokens.shape[1]
    attention_mask = torch.ones(1, 1, length, length).tril() < 0.5
    position_ids = torch.arange(length).expand_as(tokens).contiguous()
    return (tokens, position_ids, attention_mask), (labels, (labels != 0).float())


def get_params_for_weight_decay(model: nn.Module) -> list[dict[str, Any]]:
    decayed: dict[str, Any] = {"params": [], "name": "weight_decay_params"}
    others: dict[str, Any] = {"params": [], "weight_decay": 0.0, "name": "no_weight_decay_params"}
    for module in model.modules():
        group = others if isinstance(module, nn.LayerNorm) else decayed
        for name, parameter in module._parameters.items():
            if parameter is not None:
                (others if name == "bias" else group)["params"].append(parameter)
    return [decayed, others]


class AnnealingLR:
    """A schedule of the script's own."""

    def __init__(self, optimizer: Any, start_lr: float) -> None:
        self.optimizer, self.start_lr, self.num_iters = optimizer, start_lr, 0
        self.step(0)

    def get_lr(self) -> float:
        return self.start_lr * (1 - self.num_iters / 20)

    def step(self, step_num: int | None = None) -> None:
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"start_lr": self.start_lr, "num_iters": self.num_iters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start_lr = state["start_lr"]
        self.step(state["num_iters"])


def texts(seed: int) -> Any:
    """Batches for ever, the same on every rank that reads."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield {"text": torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)}


def setup_model_and_optimizer(neox_args: Namespace, mpu: Mpu) -> Any:
    model = GPT2ModelPipe(neox_args, topology=mpu.topology)
    param_groups = get_params_for_weight_decay(model)
    optimizer = torch.optim.Adam(param_groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    lr_scheduler = AnnealingLR(optimizer, 0.02)
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=neox_args,
        lr_scheduler=lr_scheduler,
        dist_init_required=False,
        model_parameters=None,
        mpu=None,
    )
    model.total_params = sum(parameter.numel() for parameter in model.module.parameters())
    model.set_has_attention_mask(True)
    model.set_batch_fn(partial(get_batch_pipe, neox_args=neox_args))
    return model, optimizer, lr_scheduler


def iterator_of(mpu: Mpu, seed: int) -> Any:
    stage, stages = mpu.get_pipe_parallel_rank(), mpu.get_pipe_parallel_world_size()
    return texts(seed + 100 * mpu.get_data_parallel_rank()) if stage in (0, stages - 1) else None


def generate(model: Any, mpu: Mpu, context: Any) -> list[int]:
    """Greedy tokens, each from an evaluation of all before it, on every stage."""
    found = []
    for _ in range(3):
        model_inputs = iter([{"text": F.pad(context, pad=(0, 1))}])
        before, model.micro_batches = model.micro_batches, 1
        model.first_output_send = True
        model.pipe_recv_buf = None
        _, logits = model.eval_batch(model_inputs, return_logits=True)
        model.micro_batches = before
        source = model.grid.stage_to_global(model.num_stages - 1)
        token = torch.zeros(1, dtype=torch.long) if logits is None else logits[0, -1].argmax()[None]
        torch.distributed.broadcast(tensor=token, src=source, group=mpu.get_pipe_parallel_group())
        context = torch.cat([context, token[None]], 1)[:, -LENGTH:]
        found.append(int(token))
    return found


def main(folder: str, stages: int) -> None:
    deepspeed.init_distributed("gloo")
    world = torch.distributed.get_world_size()
    mpu = Mpu(PipeModelDataParallelTopology(num_pp=stages, num_mp=1, num_dp=world // stages))
    path = os.path.join(folder, f"ds_config_{torch.distributed.get_rank()}.json")
    with open(path, "w") as file:
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.3,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1000,
        }
        json.dump(config, file)
    interval = int(os.environ.get("CHECKPOINT_NUM_LAYERS", "0"))
    neox_args = Namespace(
        deepspeed_config=path, checkpoint_num_layers=interval, pipe_partition_method="type:transformer|mlp"
    )
    model, _, lr_scheduler = setup_model_and_optimizer(neox_args, mpu)
    assert isinstance(model, PipelineEngine)
    assert isinstance(model, DeepSpeedEngine)
    assert model.grid.get_pipe_parallel_rank() == mpu.get_pipe_parallel_rank() == model.stage_id
    assert model.grid.get_data_parallel_rank() == mpu.get_data_parallel_rank()
    assert model.grid.get_slice_parallel_rank() == 0
    assert model.is_pipe_parallel == (stages > 1)
    assert model.is_data_parallel == (world > stages)
    assert model.module.topology() is model.grid.topology()
    names = sorted(model.module.state_dict())
    training = iterator_of(mpu, 1)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(model.train_batch(data_iter=training)))
        assert model.get_additional_losses() is None if hasattr(model, "get_additional_losses") else True
        norms.append(float(model.get_global_grad_norm()))
    with torch.no_grad():
        evaluated = float(model.eval_batch(iterator_of(mpu, 2), return_logits=False))
        short = float(model.eval_batch(iterator_of(mpu, 2), num_micro_batches=2))
        alone = model.eval_batch(iterator_of(mpu, 2), bcast_loss=False)
        assert (alone is not None) == model.is_last_stage()
        _, logits = model.eval_batch(data_iter=iterator_of(mpu, 2), return_logits=True)
        assert (logits is not None) == model.is_last_stage()
    model.module.inference_mode(use_cache=False)
    tokens = generate(model, mpu, torch.arange(1, LENGTH + 1)[None])
    model.module.clear_cache()
    model.module.train_mode()
    model.train()
    model.reset_activation_shape()
    model.save_checkpoint(folder, tag=f"global_step{STEPS}", client_state={"iteration": STEPS})
    after = [float(model.train_batch(data_iter=training)) for _ in range(2)]
    if os.environ.get("LOADS", "1") == "1":
        model, _, lr_scheduler = setup_model_and_optimizer(neox_args, mpu)
        loaded, state = model.load_checkpoint(folder, load_optimizer_states=True, load_lr_scheduler_states=True)
        assert loaded is not None
        assert state["iteration"] == STEPS
        training = iterator_of(mpu, 1)
        for _ in range(STEPS * MICRO_BATCHES if training is not None else 0):
            next(training)
        again = [float(model.train_batch(data_iter=training)) for _ in range(2)]
        assert again == after, (again, after)
    if model.is_last_stage() and mpu.get_data_parallel_rank() == 0:
        result = {"losses": losses, "norms": norms, "evaluated": evaluated, "short": short, "tokens": tokens}
        result |= {"after": after, "rate": lr_scheduler.get_lr(), "names": names}
        result |= {"logits": float(logits.double().pow(2).sum())}
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
