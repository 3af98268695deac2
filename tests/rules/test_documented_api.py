"""Every parameter, result and field of the documented API is described in a Google-style section.

The documented API is what docs/reference/api.md and docs/reference/contracts.md show.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

from contracts import SECTIONS  # noqa: E402
from documented_api import documented, gaps  # noqa: E402
from google_docstring import split  # noqa: E402

TODO_API: frozenset[str] = frozenset(
    {
        "polyaccel.accelerators.detect.choose_accelerator",
        "polyaccel.accelerators.detect.get_accelerator",
        "polyaccel.accelerators.detect.set_accelerator",
        "polyaccel.accelerators.named_random.RngTracker",
        "polyaccel.comm.api.functions.P2POp",
        "polyaccel.comm.api.functions.all_gather_coalesced",
        "polyaccel.comm.api.functions.all_gather_into_tensor",
        "polyaccel.comm.api.functions.all_gather_object",
        "polyaccel.comm.api.functions.all_reduce",
        "polyaccel.comm.api.functions.all_reduce_coalesced",
        "polyaccel.comm.api.functions.all_to_all_single",
        "polyaccel.comm.api.functions.barrier",
        "polyaccel.comm.api.functions.batch_isend_irecv",
        "polyaccel.comm.api.functions.broadcast",
        "polyaccel.comm.api.functions.broadcast_object_list",
        "polyaccel.comm.api.functions.gather",
        "polyaccel.comm.api.functions.get_global_rank",
        "polyaccel.comm.api.functions.get_local_rank",
        "polyaccel.comm.api.functions.get_rank",
        "polyaccel.comm.api.functions.get_world_size",
        "polyaccel.comm.api.functions.inference_all_reduce",
        "polyaccel.comm.api.functions.irecv",
        "polyaccel.comm.api.functions.isend",
        "polyaccel.comm.api.functions.new_group",
        "polyaccel.comm.api.functions.recv",
        "polyaccel.comm.api.functions.reduce_scatter_coalesced",
        "polyaccel.comm.api.functions.reduce_scatter_tensor",
        "polyaccel.comm.api.functions.scatter",
        "polyaccel.comm.api.functions.send",
        "polyaccel.comm.init.setup.destroy_process_group",
        "polyaccel.comm.init.setup.init_distributed",
        "polyaccel.config.load.load_config",
        "polyaccel.config.resolve.load_resolved",
        "polyaccel.config.resolve.resolve_config",
        "polyaccel.config.root.json_schema",
        "polyaccel.engine.base.Engine",
        "polyaccel.frontend.initialize",
        "polyaccel.jax.engine.JaxEngine",
        "polyaccel.jax.program.batches.replicated",
        "polyaccel.torch.api.activations.checkpoint",
        "polyaccel.torch.api.activations.configure",
        "polyaccel.torch.api.fragments.safe_get_full_fp32_param",
        "polyaccel.torch.api.fragments.safe_get_full_grad",
        "polyaccel.torch.api.fragments.safe_get_full_optimizer_state",
        "polyaccel.torch.api.fragments.safe_get_local_fp32_param",
        "polyaccel.torch.api.fragments.safe_get_local_grad",
        "polyaccel.torch.api.fragments.safe_get_local_optimizer_state",
        "polyaccel.torch.api.fragments.safe_set_full_fp32_param",
        "polyaccel.torch.api.fragments.safe_set_full_grad",
        "polyaccel.torch.api.fragments.safe_set_full_optimizer_state",
        "polyaccel.torch.api.fragments.safe_set_local_fp32_param",
        "polyaccel.torch.api.fragments.safe_set_local_grad",
        "polyaccel.torch.api.fragments.safe_set_local_optimizer_state",
        "polyaccel.torch.api.gathered.GatheredParameters",
        "polyaccel.torch.api.gathered.unwrap_model_for_generation",
        "polyaccel.torch.data.ShardedDataLoader",
        "polyaccel.torch.deferred_init.init.Init",
        "polyaccel.torch.engine.torch_engine.TorchEngine",
        "polyaccel.torch.sharding.leaf_modules.fine_grained_modules",
        "polyaccel.torch.sharding.leaf_modules.get_leaf_modules",
        "polyaccel.torch.sharding.leaf_modules.get_z3_leaf_modules",
        "polyaccel.torch.sharding.leaf_modules.granularity",
        "polyaccel.torch.sharding.leaf_modules.is_leaf_module",
        "polyaccel.torch.sharding.leaf_modules.mark_configured_leaves",
        "polyaccel.torch.sharding.leaf_modules.matching_modules",
        "polyaccel.torch.sharding.leaf_modules.require_unsharded",
        "polyaccel.torch.sharding.leaf_modules.set_configured_leaves",
        "polyaccel.torch.sharding.leaf_modules.set_leaf_modules",
        "polyaccel.torch.sharding.leaf_modules.set_z3_leaf_module",
        "polyaccel.torch.sharding.leaf_modules.set_z3_leaf_modules",
        "polyaccel.torch.sharding.leaf_modules.set_z3_leaf_modules_by_name",
        "polyaccel.torch.sharding.leaf_modules.set_z3_leaf_modules_by_suffix",
        "polyaccel.torch.sharding.leaf_modules.unset_leaf_modules",
        "polyaccel.torch.sharding.leaf_modules.unset_z3_leaf_modules",
        "polyaccel.torch.sharding.leaf_modules.z3_leaf_module",
        "polyaccel.torch.sharding.units.register_external_parameter",
        "polyaccel.torch.sharding.units.set_units",
        "polyaccel.torch.sharding.units.unregister_external_parameter",
    }
)
"""Names of docs/reference/api.md whose sections are not written yet."""
TODO_CONTRACTS: frozenset[str] = frozenset()
"""Names of docs/reference/contracts.md whose sections are not written yet."""


def test_the_documented_api_has_sections() -> None:
    todo = TODO_API | TODO_CONTRACTS
    found = [gap for one in documented(SECTIONS) if one.name not in todo for gap in gaps(one)]
    assert found == []


def test_what_is_done_is_not_left_to_do() -> None:
    lacking = {one.name for one in documented(SECTIONS) if any(gaps(one))}
    assert lacking >= TODO_API | TODO_CONTRACTS


def test_a_docstring_is_split_into_sections() -> None:
    doc = split(
        """Return a part.

        More of it.

        Args:
            buffer: The whole. It
                goes on.
            *rest: Others.

        Returns:
            A view, two
            lines.

        Raises:
            ShardingError: It does not fit.
        """
    )
    assert doc.prose == "Return a part.\n\nMore of it."
    assert doc.named["Args"] == {"buffer": "The whole. It goes on.", "*rest": "Others."}
    assert doc.named["Raises"] == {"ShardingError": "It does not fit."}
    assert doc.plain == {"Returns": "A view, two lines."}
