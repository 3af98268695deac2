"""States that go from one plan of a step to the next, when parameters that were frozen are trained from now on.

[Note: A new plan]
Frozen parameters have no master weights, no optimizer states and no gradients, so their buckets are of another kind
than those of trained ones. When one of them requires a gradient, everything is laid out anew between two optimizer
steps: the module takes its values back, a second `ZeroStep` is built as for a new engine, and what the first one knows
of its parameters moves over. For that moment both exist, and under sharded parameters the whole module too.
"""

from __future__ import annotations

from collections.abc import Callable

from polyaccel.torch.adapter import TorchAdapter
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.zero.fragments import PARAM, fragment, read_whole
from polyaccel.zero.step import ZeroStep


def is_due(adapter: TorchAdapter, step: ZeroStep) -> bool:
    """Whether a new plan is due, and possible: not in the middle of an accumulation, nor for a client's optimizer.

    There the update refuses parameters that were unfrozen.
    """
    is_possible = not step.holds_gradients and not isinstance(step.optimizer, ClientOptimizer)
    return adapter.has_unfrozen() and is_possible


def follow(adapter: TorchAdapter, before: ZeroStep, lay_out: Callable[[], ZeroStep]) -> None:
    """Let the step that `lay_out` builds go on where `before` is, which `adapter` shows to the module until now.
    Collective."""
    adapter.require_nothing_away()
    adapter.adopt_changes()
    adapter.release(is_followed=True)
    _carry_over(before, lay_out())
    before.close()


def _carry_over(before: ZeroStep, after: ZeroStep) -> None:
    """Give `after` the master weights, optimizer states and counts of updates that `before` has. Collective.

    The parameters that `before` trains are trained by `after` too, by the same optimizer.
    """
    after.steps.update(before.steps)  # before master weights are rounded, which depends on it
    names = () if before.optimizer is None else before.optimizer.state_names
    for fqn in before.steps:
        for kind in (PARAM, *names):
            whole = read_whole(before, fqn, kind)
            own = fragment(after, fqn, kind)
            if own is not None:
                own.values.copy_from(whole.view(own.start, own.values.numel))
    after.params.publish_masters()
