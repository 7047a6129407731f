"""`watch`: diagnose any training loop, without a guard and without changes to the loop."""

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
from holdfast.learning.alignment import alignment_facts
from holdfast.learning.finding import Finding
from holdfast.learning.observer import Observer
from holdfast.learning.subjects import Intent, Subjects
from holdfast.numerics.eager import as_written, is_symbolic

LOG_LEVELS = {"error": logging.ERROR, "advice": logging.WARNING, "note": logging.INFO}

_log = logging.getLogger("holdfast")


class Watch:
    """A context manager that observes the training loop in its body. Call `watch` to create one."""

    def __init__(self, observer: Observer, optimizers: Mapping[str, Optimizer]) -> None:
        self._observer = observer
        self._optimizers = optimizers
        self._hooks: list[Any] = []
        # Number of function modes that were active when the context was entered.
        self._modes_at_start = 0

    def __enter__(self) -> Self:
        self._modes_at_start = torch._C._len_torch_function_stack()
        self._observer.install()
        for name, optimizer in self._optimizers.items():
            self._hooks += [
                optimizer.register_step_pre_hook(partial(self._before_step, name)),
                optimizer.register_step_post_hook(partial(self._after_step, name)),
            ]
        self._sample_if_due()
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
            self._log(self._observer.findings.take_fresh())
        finally:
            self._observer.close()

    def findings(self) -> list[Finding]:
        """Return the findings so far, most important first."""
        return self._observer.findings.reported()

    def diagnose(self) -> list[Finding]:
        """Return the findings so far, including those that are reported only on request.

        Examples of such findings are that a run learns nothing (H828) or that its loss has risen
        (H826). They are often right, but not often enough to be reported for every run.
        """
        self._observer.judge_now()
        return self._observer.findings.all()

    def facts(self) -> dict[str, Any]:
        """Return the measurements on which the findings are based, as plain data.

        For each parameter, ``["layers"]`` contains the median RMS of the gradient's elements, and
        the median norm of an update relative to the norm of the weights.
        """
        return dataclasses.asdict(self._observer.observations())

    def validated(self, loss: float) -> None:
        """Record the loss of an evaluation. Lower is better."""
        self._observer.validated(float(loss))

    def aligned(
        self,
        attention: torch.Tensor,
        input_lengths: torch.Tensor,
        output_lengths: torch.Tensor,
        **limit: Any,
    ) -> None:
        """Record the attention of a speech synthesis model during an evaluation.

        For the arguments, see `holdfast.learning.alignment.alignment_facts`.
        """
        self._observer.aligned(alignment_facts(attention, input_lengths, output_lengths, **limit))

    def _sample_if_due(self) -> None:
        if not self._observer.due():
            return
        self._observer.begin_sampling()
        # If the caller has entered another function mode in the meantime, leaving it would pop the
        # observer's mode instead. In that case, function calls are not observed in this step.
        if torch._C._len_torch_function_stack() == self._modes_at_start:
            self._observer.hooks.enter_mode()

    def _before_step(self, name: str, _optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_symbolic():
            return
        # `args` contains the positional arguments of step(), preceded by the optimizer itself.
        closures = (kwargs.get("closure"), *args[1:])
        has_closure = any(closure is not None for closure in closures)
        self._observer.before_step(name, closure=has_closure)
        if not self._observer.uses_closure:
            self._observer.hooks.leave_mode()

    def _after_step(self, name: str, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if is_symbolic():
            return
        self._observer.after_step(name)
        self._observer.hooks.leave_mode()
        self._log(self._observer.end_step())
        self._sample_if_due()

    def _log(self, findings: Sequence[Finding]) -> None:
        notice = self._observer.hooks.take_notice()
        if notice is not None:
            _log.warning("%s", notice)
        for finding in findings:
            _log.log(LOG_LEVELS[finding.severity], "%s", finding)


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
    """Diagnose why a model does not learn, in any training loop.

    Losses, targets and gradients are observed in the first 8 steps, then in about one in 12 steps,
    and after 400 steps in about one in 80. Layers, weights, inputs and the arguments of losses are
    examined in the first 6 steps, then in about one in 40, and after 400 steps in about one in 160.

    Observation does not affect the results of training: it draws no random numbers and changes no
    values. If the process uses ``torch.compile``, observations that need hooks on a model are
    turned off, and a message is logged once.

    Args:
        model: A module, or a dict of modules by name.
        optimizer: An optimizer, or a dict of optimizers by name.
        scheduler: A learning rate scheduler, or a dict of schedulers by name, to check that they
            are stepped at the right times.
        total_steps: Planned number of optimizer steps.
        objective: How the loss is used: ``"minimize"``, ``"adversarial"`` or ``"reinforcement"``.
        frozen: Names of parameters that are frozen on purpose, or shell patterns that match such
            names.
        ignore: Ids of rules whose findings should not be reported, such as ``"H808"``.

    Returns:
        A context manager to run the training loop in. Its method ``findings()`` returns the
        findings. Each finding is also logged once, to the logger ``holdfast``.

    Raises:
        PolicyError: H102 or H105 for an invalid argument, H702 for an ignored rule that does not
            exist.

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
    # A string is a sequence of characters, but here it stands for a single name.
    frozen = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    policy = Policy(objective=objective, frozen=frozen, ignore_rules=ignore)
    for rule in policy.ignore_rules:
        find_rule(rule)
    optimizers = _by_name(optimizer, "optimizer", Optimizer)
    models, compiled = as_written(_by_name(model, "model", nn.Module))
    schedulers = {} if scheduler is None else _by_name(scheduler, "scheduler", object)
    subjects = Subjects(
        models=models, optimizers=optimizers, schedulers=schedulers, compiled=compiled
    )
    intent = Intent(
        total_steps=total_steps, objective=objective, frozen=frozen, ignore=frozenset(ignore)
    )
    return Watch(Observer(subjects, intent), optimizers)


def _by_name(argument: Any, name: str, kind: type) -> dict[str, Any]:
    """Return objects by name: a copy of a dict, or a single object under the default name `name`.

    Raises:
        PolicyError: H105 if an object is not of type `kind`.
    """
    objects = dict(argument) if isinstance(argument, Mapping) else {name: argument}
    for key, value in objects.items():
        if value is None or not isinstance(value, kind):
            raise PolicyError(
                f"{name} {key!r} is a {type(value).__name__}",
                limit=f"{name} must be a torch {name}, or a dict of them by name",
                fix=(
                    'pass one object, or a dict such as {"generator": ..., "discriminator": ...}.'
                ),
                rule="H105",
            )
    return objects
