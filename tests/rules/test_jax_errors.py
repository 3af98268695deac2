"""Errors that users of JAX meet have a hint, and speak of arrays and trees, never of what torch alone has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "polyaccel" / "jax"
ERRORS = {"PolyaccelError", "ShardingError", "CheckpointError", "PipelineError", "VerificationError", "CommError"}
OF_TORCH = re.compile(r"requires_grad|nn\.Module|\.backward\b|optimizer\.step|no_grad|DataLoader|torch\.Tensor")


def _errors() -> Iterator[tuple[str, ast.Call]]:
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS:
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node


def _text(node: ast.AST) -> str:
    texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return " ".join(text for text in texts if isinstance(text, str))


def test_errors_have_hints_in_words_of_jax() -> None:
    errors = dict(_errors())
    assert len(errors) > 80
    assert [at for at, node in errors.items() if not any(one.arg == "hint" for one in node.keywords)] == []
    assert [at for at, node in errors.items() if OF_TORCH.search(_text(node))] == []
