"""`watch`: the diagnosis for a training loop of one's own, without a guard and without changing
the loop.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.core.errors import PolicyError
from holdfast.core.policy.kinds import Objective
from holdfast.core.policy.policy import Policy
from holdfast.explain.rules import find_rule
from holdfast.learning.finding import Finding
from holdfast.learning.observer import Observer
from holdfast.numerics.alignment import alignment_facts
from holdfast.numerics.eager import as_written, is_symbolic

_log = logging.getLogger("holdfast")
_LEVELS = {"error": logging.ERROR, "advice": logging.WARNING, "note": logging.INFO}


class Watch:
    """A running observation; made by `watch`, used as a context manager."""

    def __init__(self, observer: Observer, optimizers: Mapping[str, Optimizer]) -> None:
        self._observer = observer
        self._optimizers = optimizers
        self._depth = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._depth = torch._C._len_torch_function_stack()
        self._observer.install()
        for name, optimizer in self._optimizers.items():
            self._hooks.append(optimizer.register_step_pre_hook(partial(self._before_step, name)))
            self._hooks.append(optimizer.register_step_post_hook(partial(self._after_step, name)))
        self._look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._observer.hooks.leave_mode()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            self._observer.finish()
            self._log(self._observer.take_fresh())
        finally:
            self._observer.close()

    def findings(self) -> list[Finding]:
        """Return what was found until now, the most important first."""
        return self._observer.findings()

    def facts(self) -> dict[str, Any]:
        """Return the plain data that the findings rest on.

        ``["layers"]`` has, by parameter, the usual size of the gradient's elements and the usual
        length of a step beside that of the weights; ``["dead_units"]`` and ``["saturated"]`` have
        shares of activations by module.
        """
        return dataclasses.asdict(self._observer.facts())

    def validated(self, loss: float) -> None:
        """Take in the loss of an evaluation; less is better."""
        self._observer.validated(float(loss))

    def aligned(
        self,
        attention: torch.Tensor,
        input_lengths: torch.Tensor,
        output_lengths: torch.Tensor,
        **limit: Any,
    ) -> None:
        """Take in the attention of a speech synthesiser.

        See `holdfast.numerics.alignment.alignment_facts`.
        """
        self._observer.aligned(alignment_facts(attention, input_lengths, output_lengths, **limit))

    def _look(self) -> None:
        if self._observer.due():
            self._observer.look()
            # Inside a mode of the caller's own, ours would be left by the caller's exit: then not
            # in this step.
            if torch._C._len_torch_function_stack() == self._depth:
                self._observer.hooks.enter_mode()

    def _before_step(self, name: str, _optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_symbolic():
            return
        # The arguments of step() as torch passes them on: the optimizer itself comes first.
        closure = any(given is not None for given in (kwargs.get("closure"), *args[1:]))
        self._observer.before_step(name, closure=closure)
        if not self._observer.closure:
            self._observer.hooks.leave_mode()

    def _after_step(self, name: str, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not is_symbolic():
            self._observer.after_step(name)
            self._observer.hooks.leave_mode()
            self._log(self._observer.end_step())
            self._look()

    def _log(self, findings: Sequence[Finding]) -> None:
        if (notice := self._observer.take_notice()) is not None:
            _log.warning("%s", notice)
        for finding in findings:
            _log.log(_LEVELS[finding.severity], "%s", finding)


def watch(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    *,
    scheduler: Any = None,
    total_steps: int | None = None,
    objective: Objective = "minimize",
    frozen: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> Watch:
    """Look for the reasons why a model does not learn, in any loop.

    Losses, their targets and gradients are seen in the first 8 steps, then in one of 12, after 400
    steps one of 80. Layers, activations, weights and inputs are looked into in the first 6, then in
    one of 40, later one of 160.
    Observing changes no result: no random number is drawn and no value is altered. Where
        ``torch.compile`` is at work
    in the process, only what needs no look inside of a model is observed, which is said once.

    Args:
        model: One module, or a dict of named ones.
        optimizer: One optimizer, or a dict of named ones.
        scheduler: Learning-rate scheduler(s), to see whether they are advanced at the right times.
        total_steps: Optimizer steps that the run is meant to have.
        objective: What the loss means: ``"minimize"``, ``"adversarial"`` or ``"reinforcement"``.
        frozen: Shell patterns of names of parameters that are meant not to learn.
        ignore: Rules that shall be silent, such as ``"H808"``.

    Returns:
        A context manager; what was found is in its ``findings()``, and is logged to ``holdfast``
        when first found.

    Raises:
        PolicyError: H102 or H105 for an argument that cannot be, H702 for a rule to ignore that
            does not exist.

    Example:
        >>> import torch
        >>> from holdfast.learning.watch import watch
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> x, y = torch.randn(8, 2), torch.randint(2, (8,))
        >>> with watch(model, optimizer) as watching:
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         probabilities = model(x).softmax(-1)
        ...         torch.nn.functional.cross_entropy(probabilities, y).backward()
        ...         optimizer.step()
        >>> watching.findings()[0].rule
        'H836'
    """
    frozen = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    checked = Policy(objective=objective, frozen=frozen, ignore_rules=ignore)
    for rule in checked.ignore_rules:
        find_rule(rule)
    optimizers = _named(optimizer, "optimizer", Optimizer)
    models, compiled = as_written(_named(model, "model", nn.Module))
    observer = Observer(
        models,
        optimizers,
        {} if scheduler is None else _named(scheduler, "scheduler", object),
        total_steps=total_steps,
        objective=objective,
        frozen=frozen,
        ignore=ignore,
        compiled=compiled,
    )
    return Watch(observer, optimizers)


def _named(given: Any, what: str, kind: type) -> dict[str, Any]:
    found = dict(given) if isinstance(given, Mapping) else {what: given}
    for name, value in found.items():
        if not isinstance(value, kind) or value is None:
            raise PolicyError(
                f"{what} {name!r} is a {type(value).__name__}",
                limit=f"a torch {what} is needed, or a dict of such",
                fix=(
                    'pass one object, or a dict of named ones such as {"generator": ...,'
                    ' "discriminator": ...}.'
                ),
                rule="H105",
            )
    return found
