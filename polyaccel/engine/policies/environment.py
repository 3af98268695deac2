"""The environment variables that go before a key of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from polyaccel.config import ResolvedConfig

VARIABLES: Mapping[str, str] = {
    "DS_ACCELERATOR": "accelerator",
    "POLYACCEL_ACCELERATOR": "accelerator",
    "POLYACCEL_COMM": "comm.backend",
    "POLYACCEL_MATRIX_KERNELS": "matrix_kernels",
    "POLYACCEL_LOG": "log_level",
    "POLYACCEL_VERIFY": "verify",
}
"""The key that each of them replaces; docs/reference/environment.md explains them."""


def replaced_values(config: ResolvedConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each written value of `config` that `environment` replaces by another."""
    for variable, key in VARIABLES.items():
        written: object = config
        for name in key.split("."):
            written = getattr(written, name)
        value = environment.get(variable, "").strip()
        if value and written is not None and value.lower() != str(written).lower():
            yield f"{key} = {written!r} is replaced by {variable}={value}"
