"""What the ranks of `experts.py` train: two layers of experts that two ranks share, of two that have the same, at stage
2. Says where it begins, each step's loss to the bit, a wrong sum, and a digest of its parameters."""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import CheckpointError

WIDTH, INNER, EXPERTS, MOST, SAVE_EVERY = 8, 12, 6, 40, 10


class Experts(nn.Module):
    """Experts as those of transformers."""

    def __init__(self, is_whole: bool = False) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.has_gate, self.has_bias, self.is_transposed, self.has_post_expert_norm = True, False, False, False
        self.is_whole = is_whole
        self.gate_up_proj = nn.Parameter(self._drawn(EXPERTS, 2 * INNER, WIDTH), requires_grad=not is_whole)
        self.down_proj = nn.Parameter(self._drawn(EXPERTS, WIDTH, INNER), requires_grad=not is_whole)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randint(-1, 2, shape).float() if self.is_whole else torch.randn(shape) / 3

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * up if self.is_whole else nn.functional.silu(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            inner = self._apply_gate(hidden_states[token] @ self.gate_up_proj[expert].T)
            out = out.index_add(0, token, inner @ self.down_proj[expert].T * top_k_weights[token, place, None])
        return out


class Mixture(nn.Module):
    """Layers around experts that are told what tokens choose; experts of whole numbers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second, self.whole = Experts(), Experts(), Experts(is_whole=True)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        x = self.before(x)
        x = x + self.first(x, chosen, weights)
        x = x + self.second(x, chosen.flip(0), weights)
        return (self.after(x) - 1.0).square().sum() / MOST


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, two experts of each (`EXPERTS` is none), and weights: of one of five kinds, which each rank draws."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    kind, count = (int(torch.randint(most, (), generator=draw)) for most in (5, MOST + 1))
    chosen = torch.stack([torch.randperm(EXPERTS, generator=draw)[:2] for _ in range(count)] or [torch.zeros(2).long()])
    chosen = chosen[:count]
    if kind == 0:  # all to one
        chosen[:, 0] = chosen[:1, 0]
        chosen[:, 1] = EXPERTS
    elif kind == 1:  # to the first few
        chosen %= 2
        chosen[chosen[:, 0] == chosen[:, 1], 1] = EXPERTS
    elif kind == 2:  # many to none
        chosen[torch.rand(count, 2, generator=draw) < 0.7] = EXPERTS
    elif kind == 3 and step % 3 == 0:  # none at all
        chosen[:] = EXPERTS
    return torch.randn(count, WIDTH, generator=draw), chosen, torch.rand(count, 2, generator=draw) + 0.1


def compare_whole(module: Experts, alone: Experts, chosen: Tensor, step: int) -> None:
    """Sums of whole numbers are exact, whoever adds them. Collective."""
    x = torch.arange(chosen.shape[0] * WIDTH, dtype=torch.float32).view(-1, WIDTH).add_(step).fmod_(5.0) - 2.0
    found = []
    for experts in (module, alone):
        given = x.clone().requires_grad_()
        out = experts(given, chosen, torch.full(chosen.shape, 2.0))
        (out * x).sum().backward()
        found.append((out.detach(), given.grad))
    for what, ours, theirs in zip(("sum", "gradient"), *found, strict=True):
        if not torch.equal(ours, theirs):
            say(f"wrong sum: {what} of step {step}")


def main() -> None:
    """`expert_ranks.py FOLDER STEPS [alone]`."""
    folder, last, is_alone = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": MOST,
        "gradient_clipping": 1.0,
        "matrix_kernels": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 400},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "checkpoint": {"keep_last": 2},
    }
    model = Mixture()
    alone = Experts(is_whole=True)
    alone.load_state_dict(model.whole.state_dict())
    engine = polyaccel.initialize(model=model, config=config)[0]
    rank, saves = engine.communicator.rank, str(folder / "saves")
    if not is_alone:
        try:
            engine.load_checkpoint(saves)
        except CheckpointError as error:  # the first start, or nothing was saved yet
            say("nothing:", error.message.splitlines()[0])
    say("begins", os.environ["POLYACCEL_RESTART_COUNT"] if not is_alone else 0, engine.global_steps, os.getpid())
    while (step := engine.global_steps + 1) <= last:
        x, chosen, weights = batch_of(step, rank)
        compare_whole(model.whole, alone, chosen, step)
        loss = engine(x, chosen, weights)
        engine.backward(loss)
        engine.step()
        say("loss", step, loss.item().hex())
        if step % SAVE_EVERY == 0 and not is_alone:
            engine.save_checkpoint(saves)
    digest = blake2b(b"".join(value.detach().numpy().tobytes() for value in engine.module_state_dict().values()))
    say("ends", engine.global_steps, digest.hexdigest()[:32])
    engine.destroy()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece


if __name__ == "__main__":
    main()
