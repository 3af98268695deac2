"""Sizes as a person reads them: in units of 1024, as every verb and log line has them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """Three digits and a unit: `1.53 GiB`."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value /= 1024
        unit += 1
    decimals = 0 if not unit or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f} {UNITS[unit]}"
