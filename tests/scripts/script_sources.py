"""Files of public repositories at a pinned commit, from folders of git directories or from GitHub."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


def git_directory(repository: str, folders: Sequence[Path], clones: Path) -> Path:
    """The git directory of a repository: one that is here, or a clone without files, which GitHub fills as needed."""
    owner, name = repository.split("/")
    for folder in (*folders, clones):
        for place in (
            f"{owner}+{name}/repo/.git",
            f"{owner}+{name}/repo",
            f"{owner}/{name}/.git",
            f"{owner}/{name}.git",
        ):
            if (folder / place / "HEAD").exists():
                return folder / place
    clone = clones / owner / f"{name}.git"
    clone.parent.mkdir(parents=True, exist_ok=True)
    address = f"https://github.com/{repository}"
    subprocess.run(["git", "clone", "-q", "--bare", "--filter=blob:none", address, str(clone)], check=True)
    return clone


def write_files(directory: Path, commit: str, prefixes: Sequence[str], target: Path) -> None:
    """Write the files of a commit whose paths begin with one of `prefixes` below `target`."""
    git = ["git", f"--git-dir={directory}"]
    for path, content in _contents(git, commit, prefixes):
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _contents(git: list[str], commit: str, prefixes: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "-z", commit, "--", *prefixes], capture_output=True, check=True
    ).stdout
    names: dict[str, str] = {}
    for entry in filter(None, listed.split(b"\0")):
        facts, _, path = entry.partition(b"\t")
        mode, kind, name = facts.decode().split()
        if kind == "blob" and mode != "120000":
            names[path.decode()] = name
    asked = "".join(f"{name}\n" for name in names.values()).encode()
    answer = subprocess.run([*git, "cat-file", "--batch"], input=asked, capture_output=True, check=True).stdout
    place = 0
    for path in names:
        head, _, _ = answer[place : place + 200].partition(b"\n")
        place += len(head) + 1
        if head.endswith(b"missing"):  # large files that a snapshot leaves out
            continue
        size = int(head.split()[2])
        yield path, answer[place : place + size]
        place += size + 1
