"""The section about saved states: `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from polyaccel.config.section import PluginTable, PositiveFloat, PositiveInt, Section


def _capitalised(value: Any) -> Any:
    """DeepSpeed takes these words in any case."""
    return value.capitalize() if isinstance(value, str) else value


class KeepBestConfig(Section):
    """Checkpoints that stay for a number in their `client_state`. While no checkpoint has it, nothing is deleted."""

    metric: str = Field(min_length=1)
    """The number's dotted name: "eval.loss" for `save_checkpoint(folder, client_state={"eval": {"loss": 1.5}})`."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest numbers are the best, or the highest."""
    count: PositiveInt = 1
    """How many stay."""


class InMemoryConfig(Section):
    """How replicas are made, which are on with this section."""

    memory: PositiveInt | None = None
    """The most bytes of host memory that a rank's two copies may take. Null is half of what the host has left, shared
    by its ranks. A rank that needs more makes no replicas, and logs that."""


class CheckpointConfig(Section):
    """Saved states. With `keep_last`, `keep_every` or `keep_best`, each save deletes the tags of its folder that none
    of the three keeps, but never the newest good one, nor the one that `latest` names."""

    allow_bytes: bool = False
    """polyaccel's own: a `client_state` may hold bytes, which are saved as they are. What reads them must not
    unpickle."""
    keep_best: KeepBestConfig | None = None
    """polyaccel's own: keep those with the best metric."""
    keep_every: PositiveInt | None = None
    """polyaccel's own: keep those whose global step is a multiple of this."""
    keep_last: PositiveInt | None = None
    """polyaccel's own: keep this many of the newest."""
    in_memory: bool | InMemoryConfig = False
    """polyaccel's own: after each optimizer step, a copy of every rank's state in the memory of a process that
    `polyaccel run --restarts N` keeps next to the ranks. When ranks are killed and the job is started again,
    `load_checkpoint` without a tag continues from there if no checkpoint on disk is newer. Without that keeper it has
    no effect, and a warning is logged."""
    storage: str | Annotated[PluginTable, Field(min_length=1, max_length=1)] = "file"
    """polyaccel's own: where checkpoints are kept, by the name of an installed plugin of the group `polyaccel.storage`,
    or `{name: {option: value, ...}}` with options of the plugin's. "file" is a folder that every rank sees,
    "node_local" one that the ranks of a host see, with a copy on the next host, "fsspec" an object store. What is
    passed to `save_checkpoint` and `load_checkpoint` as a directory is the plugin's location."""
    in_background: Annotated[bool, Field(alias="async")] = True
    """polyaccel's own: write checkpoints in a process next to each rank while training continues, from a copy in memory
    that `save_checkpoint` waits for. The checkpoint counts when it is complete; what goes wrong is raised by the next
    load or `engine.wait_for_checkpoint()`, on all ranks, and see `on_failure`. False: `save_checkpoint` returns when
    all is durable."""
    on_failure: Literal["log", "raise"] = "log"
    """polyaccel's own: what the next step or save does when a save in the background has failed. "log" logs the error
    and continues, and the next save starts a new writing process where that has ended. "raise" raises it on all
    ranks."""
    staging_memory: PositiveInt | None = None
    """polyaccel's own: the bytes of host memory that a rank's copy may take. Null is half of what the host has left,
    shared by its ranks. A rank that needs more writes while training waits, and logs that once. A load may keep as much
    between verifying and taking over; where that is too little it reads twice."""
    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capitalised)] = "Warn"
    """The reaction when ranks save or load under different tags."""
    timeout_s: PositiveFloat = 1800.0
    """polyaccel's own: the longest wait, in seconds, for a save in the background, while the next save, a load or the
    end waits for it. The writing process is killed then, and the save has failed."""

    @property
    def in_memory_section(self) -> InMemoryConfig | None:
        """The section in `in_memory`; None where replicas are off."""
        if isinstance(self.in_memory, bool):
            return InMemoryConfig() if self.in_memory else None
        return self.in_memory

    @property
    def storage_plugin(self) -> tuple[str, dict[str, Any]]:
        """The name in `storage`, and the options there."""
        if isinstance(self.storage, str):
            return self.storage, {}
        ((name, options),) = self.storage.items()
        return name, options
