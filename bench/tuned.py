"""Training that `python -m bench tuning` tunes: `tuned.py CONFIG SIZE`, until the trial ends it."""

from __future__ import annotations

import sys

import polyaccel
from bench.training import Gpt, draw_batch, load_corpus


def main(config: str, size: str) -> None:
    corpus = load_corpus()
    engine, *_ = polyaccel.initialize(model=Gpt(size), config=config)
    for step in range(1000 * engine.gradient_accumulation_steps()):
        rank, micro_batch = engine.communicator.rank, engine.train_micro_batch_size_per_gpu()
        engine.backward(engine(*draw_batch(corpus, step, rank, micro_batch)))
        engine.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
