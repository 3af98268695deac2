"""A Trainer of transformers' with a DeepSpeed config of "auto"s: nothing in it refers to polyaccel.

`--config FILE --out DIR [--classify] [--plain] [--resume CHECKPOINT] [--uncounted]`; rank 0 writes the losses to
OUT/result.json. A GPT-2 learns sentences, or a BERT (`--classify`) to distinguish two kinds of them. `--plain` is the
same job without DeepSpeed, on one process, whose micro-batch is that of two ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

STEPS, MICRO_BATCH, RANKS, ACCUMULATION = 6, 2, 2, 2


class Tokens(Dataset):
    """Random sentences of 16 tokens, whose labels are their tokens, or whether they begin with a small one."""

    def __init__(self, count: int, *, are_classes: bool = False) -> None:
        self.tokens = torch.randint(0, 97, (count, 16), generator=torch.Generator().manual_seed(7))
        self.labels = (self.tokens[:, 0] < 48).long() if are_classes else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def build(*, classifies: bool) -> PreTrainedModel:
    set_seed(3)
    if classifies:
        return BertForSequenceClassification(
            BertConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=32, intermediate_size=64, vocab_size=97,
                       max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        )  # fmt: skip
    shape = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=97, bos_token_id=0, eos_token_id=0,
                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(shape)


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--classify", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--resume", help="a checkpoint of the Trainer's")
    parser.add_argument("--uncounted", action="store_true", help="leave out what ranks on CPUs need")
    given = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=str(given.out / "run"),
        deepspeed=None if given.plain else given.config,
        ddp_backend=None if given.plain else "gloo",
        use_cpu=not given.uncounted,
        per_device_train_batch_size=MICRO_BATCH * (RANKS if given.plain else 1),
        per_device_eval_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.0,  # which a config's optimizer applies to biases too, and the Trainer's own does not
        max_grad_norm=0.5,
        # With it the Trainer multiplies losses by the number of ranks, which suits those that are sums of tokens.
        average_tokens_across_devices=not given.classify,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_steps=3,
        report_to=[],
        seed=11,
        bf16=False,
        fp16=False,
    )
    data = Tokens(STEPS * MICRO_BATCH * RANKS * ACCUMULATION, are_classes=given.classify)
    unseen = Tokens(8, are_classes=given.classify)
    trainer = Trainer(model=build(classifies=given.classify), args=arguments, train_dataset=data, eval_dataset=unseen,
                      compute_metrics=accuracy if given.classify else None)  # fmt: skip
    stage = json.loads(Path(given.config).read_text())["zero_optimization"]["stage"] if given.config else 0
    if stage == 3:
        # The Trainer refuses it at other stages. It drops the config's optimizer for good, so a resumed run needs it
        # too, and `train` destroys its engine.
        trainer.evaluate()
        trainer.model_wrapped = trainer.model
    trainer.train(resume_from_checkpoint=given.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()
    result = {"losses": losses, "found": [evaluated["eval_loss"], evaluated.get("eval_accuracy", 0.0)]}
    if given.classify:
        some = Tokens(7, are_classes=True)  # no multiple of two ranks' micro-batches
        result["found"] += trainer.predict(some).predictions.flatten().tolist()
    trainer.save_model(str(given.out / "saved"))
    if trainer.is_world_process_zero():
        kind = AutoModelForSequenceClassification if given.classify else AutoModelForCausalLM
        with torch.no_grad():
            saved = kind.from_pretrained(given.out / "saved")(input_ids=unseen.tokens, labels=unseen.labels)
        result["found"].append(saved.loss.item())
        (given.out / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
