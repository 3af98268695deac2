"""The compiled programs of plain runs of JAX, which several runs share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from polyaccel.jax.modules import as_function
from polyaccel.jax.native.program import weak_numbers
from polyaccel.jax.pipeline import LayerList
from polyaccel.jax.program.carried import StateForm
from polyaccel.jax.program.function import LossFn, loss_and_aux
from polyaccel.jax.pytree import named_leaves
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.jax.verify.plain_mesh import compiled_of, inputs_of
from polyaccel.jax.verify.plain_update import transform
from polyaccel.verify.variant import ActiveRun

_OTHER_KERNELS = {"xla_backend_optimization_level": 0, "xla_disable_hlo_passes": "fusion"}
"""Options of XLA by which a program rounds otherwise, as the engine's programs do."""
_CHOICES = re.compile(r"\b(top_k|sort|argmax|argmin|max|min|round)\b")


class PlainPrograms:
    """The compiled programs of plain runs, which those with the same kernels share: compilation is most of their cost.

    `kernels` compiles a function.
    """

    def __init__(self, given: RewriteContext, kernels: Callable[..., Any]) -> None:
        model, params = given.model, given.params
        self._kernels = kernels
        self.inputs_of = inputs_of(given)
        """Makes the inputs of the programs of a batch."""
        self._as_drawn: Callable[[], tuple[Any, Any, Any]]
        self._function: LossFn
        if isinstance(model, (list, tuple)):
            state = None if given.state is None else list(given.state)
            self._function, params = LayerList.from_model(model, params, state), list(params)
        else:
            self._function, params, state = as_function(model, given.params, given.state, with_units=False)
            self._as_drawn = partial(as_function, model, given.params, given.state)
        self._partition = given.partition
        if self._partition is not None:
            state = self._partition.on_host(state)
        self.state = state
        self.form = None if state is None else StateForm(state)
        self._model = model
        self.params = params
        self.leaves, self.structure = named_leaves(params)
        self.names = list(self.leaves)
        of_function = compiled_of(given, kernels)
        self.with_gradients = of_function(jax.value_and_grad(self._loss, has_aux=True))
        self.without = of_function(lambda leaves, batch: self._loss(leaves, {}, batch, None))
        self._updates: dict[Any, Any] = {}
        self._draws: bool | None = None

    @staticmethod
    def get_or_create(run: ActiveRun, given: RewriteContext, shared: dict[bool, PlainPrograms]) -> PlainPrograms:
        """Return the programs for `run`, and keep them in `shared`."""
        reorders = run.variant.reorders
        if reorders not in shared:
            is_other = reorders and jax.default_backend() == "cpu"
            kernels = partial(jax.jit, compiler_options=_OTHER_KERNELS if is_other else None)
            shared[reorders] = PlainPrograms(given, kernels)
        return shared[reorders]

    def update_of(self, update: Callable[..., Any]) -> Any:
        """Return the program of a transformation's `update` of whole parameters."""
        if update not in self._updates:
            self._updates[update] = self._kernels(partial(transform, update))
        return self._updates[update]

    def _loss(self, trained: Mapping[str, Any], frozen: Mapping[str, Any], batch: Any, rng: Any) -> tuple[Any, Any]:
        leaves = [trained[name] if name in trained else frozen[name] for name in self.names]
        params, batch = jax.tree.unflatten(self.structure, leaves), weak_numbers(batch)
        if self.form is None:
            return loss_and_aux(self._function(params, batch, rng))
        return loss_and_aux(self.form.split(self._function(params, self.form.tree(batch.state), batch.batch, rng)))

    def draws(self, leaves: Mapping[str, Any], inputs: Any) -> bool:
        """Return whether the function uses its random key. Called before its first gradient."""
        if self._draws is None:
            self._draws = self._looks_at_key(leaves, inputs)
            linen = sys.modules.get("flax.linen")
            if self._draws and linen is not None and isinstance(self._model, linen.Module):
                self._function, *_ = self._as_drawn()  # a block of linen draws from one key, at every stage
        return self._draws

    def has_choices(self, leaves: Mapping[str, Any], inputs: Any) -> bool:
        """Return whether the function compares numbers to choose, as routers and ReLUs do."""
        return _CHOICES.search(str(self._traced(leaves, inputs))) is not None

    def _traced(self, leaves: Mapping[str, Any], inputs: Any) -> Jaxpr:
        """The function's program."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), inputs)
        whole = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in leaves.items()}
        traced = jax.make_jaxpr(lambda own, batch, key: self._loss(own, {}, batch, key))
        key = jax.random.key(0)
        with nullcontext() if self._partition is None else self._partition.context():
            return traced(whole, shapes, key).jaxpr

    def _looks_at_key(self, leaves: Mapping[str, Any], inputs: Any) -> bool:
        program = self._traced(leaves, inputs)
        live = {id(atom) for atom in program.outvars}
        for equation in reversed(program.eqns):
            if any(id(variable) in live for variable in equation.outvars):
                live |= {id(atom) for atom in equation.invars}
        return id(program.invars[-1]) in live
