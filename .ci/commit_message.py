"""The commit-msg hook: a subject is `area: imperative summary` in at most 72 characters, above a blank line.

Call it with the file of the message. The subjects that git writes for merges, reverts and autosquash pass.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST_CHARACTERS = 72
SCISSORS = "# ------------------------ >8 ------------------------"
WRITTEN_BY_GIT = ("Merge ", "merge: ", 'Revert "', "fixup! ", "squash! ", "amend! ")
SUBJECT = re.compile(r"(?P<area>[\w.][\w./-]*): (?P<summary>\S.*)")
WORD = re.compile(r"[a-z]+(-[a-z]+)*")
NO_VERB = re.compile(r"an?|all|each|every|it|more|new|no|some|the|there|these|this|we|what")
VERBS = {"alias", "bias", "bring", "embed", "focus", "ring", "shed", "shred", "spring", "string", "swing"}
"""Verbs in the imperative that end like a past, a participle or a third person."""
OTHER_FORM = re.compile(r".*(ing|(?<!e)ed|(?<!s)s)")


def problems(message: str) -> list[str]:
    """Return what is wrong with `message`, each with its cure."""
    lines = _without_comments(message)
    subject = lines[0] if lines else ""
    if subject.startswith(WRITTEN_BY_GIT):
        return []
    found = []
    if len(subject) > MOST_CHARACTERS:
        found.append(f"subject of {len(subject)} characters: shorten it to {MOST_CHARACTERS}")
    if (parts := SUBJECT.fullmatch(subject)) is None:
        found.append(f"subject without an area: {subject!r}: write `area: imperative summary`")
    elif not _is_imperative(word := parts["summary"].split()[0]):
        found.append(f"summary that begins with {word!r}: begin with a verb in the imperative, such as add or remove")
    if subject.endswith("."):
        found.append("full stop after the subject: remove it")
    if len(lines) > 1 and lines[1]:
        found.append("no blank line after the subject: insert one")
    return found


def _is_imperative(word: str) -> bool:
    if not WORD.fullmatch(word) or NO_VERB.fullmatch(word):
        return False
    return word in VERBS or not OTHER_FORM.fullmatch(word)


def _without_comments(message: str) -> list[str]:
    lines = message.partition(SCISSORS)[0].splitlines()
    return "\n".join(line.rstrip() for line in lines if not line.startswith("#")).strip("\n").splitlines()


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for problem in found:
        print(f"commit message: {problem}", file=sys.stderr)
    sys.exit(bool(found))
