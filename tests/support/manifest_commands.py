"""What the pods of a manifest do, as a kubelet would start it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_REFERENCE = re.compile(r"\$(\$|\([A-Za-z_][A-Za-z0-9_.-]*\))")


def pod_commands(manifest: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[list[str]]:
    """The command of each pod, in the order of their numbers; words of `places` stand for those of the cluster."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        count, command = spec["trainer"]["numNodes"], spec["trainer"]["command"]
    else:
        (node,) = spec["replicatedJobs"]
        job = node["template"]["spec"]
        count, command = job["completions"], job["template"]["spec"]["containers"][0]["command"]
    for _ in range(count):
        yield [_replaced(expanded(word, {}), places) for word in command]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` and `$$` as Kubernetes reads them; a name that is not known stays."""

    def value(found: re.Match[str]) -> str:
        name = found[1].strip("()")
        return "$" if found[1] == "$" else variables.get(name, found[0])

    return _REFERENCE.sub(value, text)


def _replaced(word: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(name, place)
    return word
