"""Why a call is left to the module's own `generate`."""

from __future__ import annotations


class Unsupported(Exception):
    """The model or the call is not one that this package decodes; the text says why."""
