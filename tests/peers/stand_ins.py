"""Tiny random models in a local cache of the Hugging Face hub, under the names that peers' tests load.

Models, data sets and metrics that a suite looks for in its working folder too are there, in folders with their names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_REVISION = "0" * 40
_GPT2 = ("gpt2", "sshleifer/tiny-gpt2", "hf-internal-testing/tiny-random-gpt2")
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_METRICS = {
    "sacrebleu": """
import sacrebleu
def score(predictions, references):
    return {"score": sacrebleu.corpus_bleu(predictions, [list(each) for each in zip(*references)]).score}
FEATURES = {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
""",
    "accuracy": """
def score(predictions, references):
    return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
FEATURES = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
""",
}
_METRIC = """import datasets
import evaluate
{body}
class Metric(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(FEATURES)
        )
    def _compute(self, predictions, references):
        return score(predictions, references)
"""
_TALK = ("What is better than ugly?", "Beautiful is better than ugly.", "Explicit is better than implicit.", "Ugly.")


def make_hub(cache: Path, suite: str, source: Path) -> None:
    """Fill `cache` for a suite, once; the folder of a suite gets what it reads from there."""
    if cache.is_dir():
        return
    if suite == "transformers":
        _make_transformers(cache)
        for name, body in _METRICS.items():
            script = source / "tests" / name / f"{name}.py"
            script.parent.mkdir(exist_ok=True)
            script.write_text(_METRIC.format(body=body))
    elif suite == "trl":
        _make_trl(source / "trl-internal-testing")
    else:
        _make_vision_and_text(cache)
    cache.mkdir(parents=True, exist_ok=True)


def _make_vision_and_text(cache: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 128, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    vision = transformers.MobileViTConfig(hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32])
    for name in _GPT2:
        _save(cache, name, transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    _save(cache, "apple/mobilevit-xx-small", vision)


def _make_transformers(cache: Path) -> None:
    import transformers

    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words += [(chr(code), -3.0) for code in range(33, 127)]
    words += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(100))]
    text = transformers.T5Tokenizer(vocab=words)
    shape: dict[str, Any] = {"vocab_size": 256, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    start: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    for name in ("patrickvonplaten/t5-tiny-random", "google-t5/t5-small"):
        _save(cache, name, transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, **start)), text)
    sizes: dict[str, Any] = {"vocab_size": 512, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens))
    _save(cache, "sshleifer/tiny-gpt2", gpt2, _bytes_of(["<|endoftext|>"], eos_token="<|endoftext|>"))
    gptj = transformers.GPTJConfig(**sizes, **tokens, rotary_dim=4)
    _save(cache, "hf-internal-testing/tiny-random-gptj", transformers.GPTJForCausalLM(gptj))
    llama = transformers.LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    _save(
        cache,
        "hf-internal-testing/tiny-random-LlamaForCausalLM",
        transformers.LlamaForCausalLM(llama),
        _bytes_of(["<s>", "</s>"], bos_token="<s>", eos_token="</s>"),
    )


def _make_trl(home: Path) -> None:
    import transformers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    text = _bytes_of(special, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    text.chat_template = _CHAT
    config = transformers.Qwen2Config(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    classifier: Any = transformers.Qwen2ForSequenceClassification
    for name, model in (
        ("tiny-Qwen2ForCausalLM-2.5", transformers.Qwen2ForCausalLM(config)),
        ("tiny-Qwen2ForSequenceClassification-2.5", classifier(_with_one(config))),
    ):
        model.save_pretrained(home / name)
        text.save_pretrained(home / name)
    ask, good, also, bad = _TALK
    asked, answered, wrong = (
        [{"role": role, "content": said}] for role, said in (("user", ask), ("assistant", good), ("assistant", bad))
    )
    _make_dataset(
        home / "zen",
        {
            "standard_language_modeling": {"text": f"{ask} {good} {also}"},
            "standard_preference": {"prompt": ask, "chosen": f" {good}", "rejected": f" {bad}"},
            "conversational_implicit_prompt_preference": {"chosen": asked + answered, "rejected": asked + wrong},
            "conversational_prompt_only": {"prompt": asked},
        },
    )


def _with_one(config: Any) -> Any:
    return type(config)(**{**config.to_dict(), "num_labels": 1})


def _make_dataset(home: Path, configs: dict[str, dict[str, Any]]) -> None:
    """Write a data set of one row, four times, for each name of a config."""
    head = ["---", "configs:"]
    for name, row in configs.items():
        folder = home / name
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
        head += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            head += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (home / "README.md").write_text("\n".join([*head, "---", ""]))


def _bytes_of(special: list[str], **roles: str) -> Any:
    """Return a tokenizer whose tokens are bytes, behind the special ones."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate([*special, *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    made: Any = transformers.PreTrainedTokenizerFast
    return made(tokenizer_object=inner, model_max_length=64, **roles)


def _save(cache: Path, name: str, *parts: Any) -> None:
    home = cache / f"models--{name.replace('/', '--')}"
    for part in parts:
        part.save_pretrained(home / "snapshots" / _REVISION)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(_REVISION)
