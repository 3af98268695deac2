"""The config: DeepSpeed's JSON, checked strictly, and resolved once for a world size."""

from __future__ import annotations

from polyaccel.config.load import load_config
from polyaccel.config.resolve import load_resolved, resolve_config
from polyaccel.config.root import Config, ResolvedConfig, json_schema

__all__ = ["Config", "ResolvedConfig", "json_schema", "load_config", "load_resolved", "resolve_config"]
