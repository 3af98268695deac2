"""Engines of polyaccel for verl: import this package, then `EngineRegistry.new(model_type, "polyaccel", ...)`."""

from polyaccel_verl.config import PolyaccelEngineConfig as PolyaccelEngineConfig
from polyaccel_verl.engine import PolyaccelEngine as PolyaccelEngine
from polyaccel_verl.engine import PolyaccelEngineWithValueHead as PolyaccelEngineWithValueHead
