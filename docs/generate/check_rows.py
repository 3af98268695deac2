"""The rows of `polyaccel plugins check`, from the contracts whose tests they are: what each wants, and why.

`python docs/generate/check_rows.py` prints them.
"""

from __future__ import annotations

from polyaccel.testkit.contract import list_tests, wanted_by
from polyaccel.testkit.suites import ALL_CONTRACTS


def check_rows() -> str:
    """The tables of the page, as Markdown."""
    lines = list[str]()
    for title, contract in ALL_CONTRACTS.items():
        lines += [f"## {title}", "", "| row | what it requires, and why |", "|---|---|"]
        for test in list_tests(contract):
            row = test.removeprefix("test_").replace("_", " ")
            lines.append(f"| {row} | {wanted_by(contract, test).replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(check_rows())
