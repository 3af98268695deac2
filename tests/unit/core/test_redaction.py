"""What is printed of variables, settings and command lines has no value of a secret."""

from __future__ import annotations

import json

import pytest

from polyaccel.errors import Problem
from polyaccel.redaction import HIDDEN, is_secret, redact_text, redact_tree, redact_variables, redact_words

VALUE = "hunter2-hunter2"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "POLYACCEL_JOB_SECRET", "PGPASSWORD", "DB_PASS"),
        *("APIKEY", "api_key", "accessKey", "--hf-token", "client.secret", "GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "max_tokens",
        "MONKEY",
        "PATH",
        "OLDPWD",
        "KEYBOARD",
        "bypass",
        "NCCL_DEBUG",
        "tokenizer",
    ],
)
def test_other_names_are_not(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "words",
    [
        ["mpirun", "-x", f"HF_TOKEN={VALUE}", "train"],
        ["srun", f"--export=ALL,HF_TOKEN={VALUE},A=1", "train"],
        ["python", "train.py", "--hf-token", VALUE, "--steps", "5"],
        ["python", "train.py", f"--api_key={VALUE}"],
        ["sh", "-c", f"cd /a && HF_TOKEN='{VALUE}' exec python train.py"],
        ["sh", "-c", f"exec python train.py --password {VALUE} --steps 5"],
        ["python", "train.py", "--proxy", f"http://me:{VALUE}@proxy:3128/"],
        ["agent", json.dumps({"secret": VALUE, "arguments": ["--token", VALUE], "exports": {"HF_TOKEN": VALUE}})],
    ],
)
def test_no_word_of_a_command_has_a_secret(words: list[str]) -> None:
    shown = redact_words(words)
    assert len(shown) == len(words)
    assert VALUE not in " ".join(shown)
    assert HIDDEN in " ".join(shown)


def test_other_words_stay() -> None:
    words = [
        "python",
        "train.py",
        "--max-tokens",
        "512",
        "A=b c",
        "it's",
        "--tokenizer=gpt2",
        "--use-auth-token",
        "--x",
    ]
    assert redact_words(words) == words
    assert redact_text("--steps 5 NCCL_DEBUG=INFO") == "--steps 5 NCCL_DEBUG=INFO"


def test_the_value_of_a_secret_is_hidden_wherever_it_stands() -> None:
    shown = redact_variables({"HF_TOKEN": VALUE, "NOTE": f"with {VALUE}", "A": "1", "DB_PASS": ""})
    assert shown == {"HF_TOKEN": HIDDEN, "NOTE": f"with {HIDDEN}", "A": "1", "DB_PASS": ""}
    assert redact_words([f"x{VALUE}y"], [VALUE]) == [f"x{HIDDEN}y"]


def test_settings_keep_what_is_no_text_of_a_secret() -> None:
    tree = {"comet": {"api_key": VALUE, "project": "p"}, "storage": {"options": {"key": VALUE, "n": 1}}, "key": None}
    assert redact_tree(tree) == {
        "comet": {"api_key": HIDDEN, "project": "p"},
        "storage": {"options": {"key": HIDDEN, "n": 1}},
        "key": None,
    }


def test_a_problem_of_a_config_does_not_show_a_key() -> None:
    assert VALUE not in str(Problem("comet.api_keyy.token", VALUE, "expected something else"))
    assert "7" in str(Problem("comet.api_key", 7, "expected text"))
