"""Teach a small Llama to sort digits by on-policy distillation: it answers, and a teacher scores each of its tokens.

    polyaccel run --ranks 2 examples/rl/distill.py

The loss of a token is the divergence of the student's distribution from the teacher's (reverse KL), on answers that the
student has sampled (GKD, arXiv 2306.13649, with the student's own answers only). A teacher is trained on right answers
first. All that the run leaves is in runs/distill.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from task import LENGTH, START, VOCABULARY, draw_prompts, rewards
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import polyaccel
from polyaccel import PolyaccelError, TorchEngine, comm


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of the student (default: 200)")
    parser.add_argument("--teacher-steps", type=int, default=400, metavar="N", help="default: 400")
    parser.add_argument("--run-dir", default="runs/distill", metavar="DIR", help="default: runs/distill, ...-2, ...")
    args = parser.parse_args()
    try:
        polyaccel.init_distributed()
        distill(args.steps, args.teacher_steps, args.run_dir)
        comm.destroy_process_group()
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def distill(steps: int, teacher_steps: int, run_dir: str) -> None:
    """The whole run. Collective."""
    settings = {"steps": steps, "teacher_steps": teacher_steps}
    folder, _ = polyaccel.begin_run(run_dir, settings, defaults=settings)
    generator = torch.Generator().manual_seed(comm.get_rank())  # other prompts on every rank
    torch.manual_seed(1)
    teacher = train_teacher(teacher_steps, generator)
    engine, *_ = polyaccel.initialize(model=new_model(32, 2), config={**config_of(steps), "run_dir": folder})
    torch.manual_seed(100 + comm.get_rank())  # and other draws
    with polyaccel.open_progress(steps) as progress:
        progress.say(f"{folder}: the teacher has {accuracy_of(teacher, generator):.1%} of the answers")
        for step in range(1, steps + 1):
            prompts = draw_prompts(engine.train_micro_batch_size_per_gpu(), generator).to(engine.device)
            sequences = engine.generate(prompts, do_sample=True, min_new_tokens=LENGTH, max_new_tokens=LENGTH)
            begin = perf_counter()
            divergence = update(engine, teacher, sequences)
            times = engine.rollout_times
            assert times is not None
            assert engine.metrics is not None
            took = {"rollout": times.generate_s, "hand-over": times.hand_over_s, "update": perf_counter() - begin}
            reward = mean_over_ranks(rewards(prompts, sequences[:, -LENGTH:]).mean())
            progress.step(engine.metrics)
            figures = {"reward": reward, "reverse_kl": mean_over_ranks(divergence), "update_s": took["update"]}
            engine.monitor.write_events([(name, value, step) for name, value in figures.items()])
            if step % 50 == 0 or step in (1, steps):
                shares = ", ".join(f"{name} {value / sum(took.values()):.0%}" for name, value in took.items())
                progress.say(
                    f"step {step}: reverse KL {figures['reverse_kl']:.3f}, reward {reward:.3f}; time: {shares}"
                )
        progress.say(f"right answers: {accuracy_of(engine, generator):.1%}; report: {folder}/report.html")
    engine.destroy()  # writes the report


def update(engine: TorchEngine, teacher: torch.nn.Module, sequences: Tensor) -> Tensor:
    """Bring the student's distribution at each token of its answers nearer to the teacher's. Returns the mean reverse
    KL of a token. Collective."""
    with torch.no_grad():
        wanted = answers_of(teacher(input_ids=sequences, use_cache=False).logits)
    found = answers_of(engine(input_ids=sequences, use_cache=False).logits)
    divergence = (found.exp() * (found - wanted)).sum(-1).mean()
    engine.backward(divergence)
    engine.step()
    return divergence.detach()


def answers_of(logits: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens at each place of the answer."""
    return logits[:, -LENGTH - 1 : -1].log_softmax(-1)


def train_teacher(steps: int, generator: torch.Generator) -> torch.nn.Module:
    """Train a larger model on right answers, and return it. Collective."""
    engine, *_ = polyaccel.initialize(model=new_model(64, 2), config=config_of(steps))
    for _ in range(steps):
        prompts = draw_prompts(engine.train_micro_batch_size_per_gpu(), generator)
        sequences = torch.cat([prompts, prompts[:, 1 : LENGTH + 1].sort(1).values], 1).to(engine.device)
        logits = engine(input_ids=sequences, use_cache=False).logits[:, -LENGTH - 1 : -1]
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, -LENGTH:].flatten()))
        engine.step()
    teacher: torch.nn.Module = new_model(64, 2)
    teacher.to(engine.device)
    teacher.load_state_dict(engine.module_state_dict())
    engine.destroy()
    return teacher.eval().requires_grad_(False)


def new_model(width: int, layers: int) -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 16}
    tokens: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": START, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens))


def config_of(steps: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(__file__).with_name("config.json").read_text(encoding="utf-8"))
    config["scheduler"]["params"]["total_num_steps"] = steps
    config["optimizer"]["params"]["lr"] = 3e-3
    del config["generation"]  # the loss needs no log-probabilities of the rollout
    return config


def accuracy_of(model: Any, generator: torch.Generator) -> float:
    """The part of new prompts whose likeliest answer is right. Collective."""
    prompts = draw_prompts(256, generator).to(next(model.parameters()).device)
    answers = model.generate(prompts, do_sample=False, min_new_tokens=LENGTH, max_new_tokens=LENGTH)[:, -LENGTH:]
    return mean_over_ranks((rewards(prompts, answers) == 1).float().mean())


def mean_over_ranks(value: Tensor) -> float:
    mean = value.detach().reshape(1).clone()
    comm.all_reduce(mean, op=comm.ReduceOp.AVG)
    return float(mean)


if __name__ == "__main__":
    sys.exit(main())
