"""`python -m bench trainer`: what its figures become."""

from __future__ import annotations

from typing import Any

from bench.table import make_console
from bench.trainer.compare import figures


def run(who: str, round_: int, seconds: list[float], losses: list[float]) -> dict[str, Any]:
    return {"who": who, "dtype": "fp32", "round": round_, "seconds": seconds, "losses": losses}


def test_speed_is_of_the_medians_over_all_rounds() -> None:
    table = figures(
        [
            run("ours", 0, [1.0, 9.0], [2.0, 1.0]),
            run("DeepSpeed", 0, [3.0, 3.0], [2.0, 1.5]),
            run("DeepSpeed", 1, [3.0, 4.0], [2.0, 2.0]),
            run("ours", 1, [1.0, 2.0], [2.0, 1.0]),
        ]
    )
    console = make_console()
    with console.capture() as shown:
        console.print(table)
    (line,) = (line for line in shown.get().splitlines() if "fp32" in line)
    row = [cell.strip() for cell in line.strip("| ").split("|")]
    assert row == ["fp32", "1500", "3000", "2.00", "1000 and 3000", "5.0e-01"]
