"""What may be printed of variables, settings and command lines: the values of secrets are hidden.

The name shows what is a secret: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, --db-password, `api_key`. All that
prints variables or command lines (plans, reports, logs, errors) prints what these functions return.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

HIDDEN = "(hidden)"
"""What is printed in place of a secret."""
_WORDS = frozenset(("token", "secret", "key", "pass", "authorization", "credential", "credentials"))
_ENDS = ("token", "secret", "secrets", "password", "passwd", "passphrase", "apikey", "accesskey", "privatekey")
_PARTS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_ASSIGNED = re.compile(r"""(?<![\w-])(-{0,2}[A-Za-z_][\w.-]*)(=)("[^"]*"|'[^']*'|[^\s,;&|"']+)""")
_OPTION = re.compile(r"""(?<!\S)(--?[A-Za-z][\w.-]*)([ \t]+)("[^"]*"|'[^']*'|[^\s"'-]\S*)""")
_IN_ADDRESS = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+@")
_LEAST_LENGTH = 6
"""A shorter value may be a switch like 1 or true, which stands in many texts."""


def is_secret(name: str) -> bool:
    """Whether the value of a variable, setting or option of that name is to be hidden."""
    parts = [part.lower() for part in _PARTS.split(name) if part]
    return any(part in _WORDS or part.endswith(_ENDS) for part in parts)


def secrets_in(variables: Mapping[str, str]) -> list[str]:
    """The values of the variables that are secrets, as far as they are long enough to be found in a text."""
    return [value for name, value in variables.items() if is_secret(name) and len(value) >= _LEAST_LENGTH]


def redact_variables(variables: Mapping[str, str], secrets: Sequence[str] = ()) -> dict[str, str]:
    """Variables of an environment as they may be printed; `secrets` are hidden in all values too."""
    hidden = [*secrets, *secrets_in(variables)]
    return {name: _redact(name, value, hidden) for name, value in variables.items()}


def redact_words(words: Iterable[str], secrets: Sequence[str] = ()) -> list[str]:
    """The words of a command line as they may be printed; `secrets` are hidden wherever they stand."""
    shown: list[str] = []
    names_next = False
    for word in words:
        name, mark, value = word.partition("=")
        if names_next and not word.startswith("-"):
            shown.append(HIDDEN)
        elif mark and name.replace("-", "_").isidentifier():
            shown.append(f"{name}={_redact(name, value, secrets)}")
        else:
            shown.append(redact_text(word, secrets))
        names_next = word.startswith("-") and not mark and is_secret(word)
    return shown


def redact_tree(value: Any, secrets: Sequence[str] = ()) -> Any:
    """A tree of settings as it may be printed."""
    if isinstance(value, Mapping):
        return {
            name: _redact(str(name), each, secrets) if isinstance(each, str) else redact_tree(each, secrets)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, str) for each in value):
            return redact_words(value, secrets)
        return [redact_tree(each, secrets) for each in value]
    return redact_text(value, secrets) if isinstance(value, str) else value


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """A text, or JSON, as it may be printed: what follows names of secrets is hidden, and so are `secrets`."""
    if text.startswith(("{", "[")):
        with suppress(ValueError):
            return json.dumps(redact_tree(json.loads(text), secrets))
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _IN_ADDRESS.sub(rf"\1:{HIDDEN}@", text)
    return _OPTION.sub(_without_value, _ASSIGNED.sub(_without_value, text))


def _redact(name: str, value: str, secrets: Sequence[str]) -> str:
    return HIDDEN if value and is_secret(name) else redact_text(value, secrets)


def _without_value(found: re.Match[str]) -> str:
    name, mark, _ = found.groups()
    return f"{name}{mark}{HIDDEN}" if is_secret(name) else found[0]
