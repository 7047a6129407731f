"""One attempt at a step: forward, backward and a look at the gradients, and the way back to where it began.

Does not: decide what follows, retry, or move a weight (see ``transaction``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import BatchError
from holdfast.core.policy import Policy
from holdfast.data.random_state import RandomState, capture, restore
from holdfast.data.splitting import Split, micro_batches, tensors_in, versions_of
from holdfast.memory.ladder import Plan
from holdfast.memory.recompute import find_blocks, recomputing
from holdfast.numerics.gradients import Group, inspect
from holdfast.run.buffers import BufferKeeper
from holdfast.run.mixed_precision import LossScale
from holdfast.run.optimizer_state import create_state, drop_state
from holdfast.run.outcome import Attempt
from holdfast.run.parts import Parts
from holdfast.run.passes import Passed, Passes
from holdfast.run.promises import LossFunction, Promises
from holdfast.run.record import RunRecord
from holdfast.run.window import Window


@dataclass(slots=True, kw_only=True)
class Work:
    """What one step works on.

    Args:
        batch: As given to the step.
        loss_fn: Of a micro-batch.
        names: Optimizers to step.
        split: How the batch is cut.
        size: Its samples, None if it cannot be cut.
        parameters: Of these optimizers.
        inputs: Where gradients may go; None: everywhere.
        random_state: At the beginning.
        tensors: In the batch.
        versions: Their counters of in-place changes at the beginning.
        attempts: Made so far.
        out_of_memory: How many of them ran out of memory.
        prepared: Whether the state of the optimizers exists.
    """

    batch: Any
    loss_fn: LossFunction
    names: Sequence[str]
    split: Split
    size: int | None
    parameters: list[torch.Tensor]
    inputs: list[torch.Tensor] | None
    random_state: RandomState
    tensors: list[torch.Tensor]
    versions: list[int]
    attempts: int = 0
    out_of_memory: int = 0
    prepared: bool = False


def _unobserved() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Attempts:
    """Makes attempts on one set of parts, and takes them back.

    Args:
        parts: Models and optimizers.
        policy: Settings.
        record: Where facts go.
    """

    def __init__(self, parts: Parts, policy: Policy, record: RunRecord) -> None:
        self._parts = parts
        self._record = record
        self._devices = parts.devices()
        self.buffers = BufferKeeper(parts.models)
        self.loss_scale = LossScale(parts.device_type(), enabled=policy.precision == "fp16")
        self.promises = Promises(parts, policy, self.buffers, record)
        self._passes = Passes(self.promises, self.loss_scale, parts.device_type(), policy.precision)
        self.blocks = find_blocks(parts.models, wanted=policy.recompute)
        self._all_parameters = [p for _, p in parts.named_parameters()]
        self.observing: Callable[[], contextlib.AbstractContextManager[None]] = _unobserved
        self._born: dict[str, list[torch.Tensor]] = {}
        self._stepped_last: list[int] = []
        self._others: list[torch.Tensor] = []  # parameters that the last step did not move

    def state_was_replaced(self) -> None:
        """Note that optimizer state was loaded: some of it may be missing again."""
        self._born.clear()

    def begin(self, batch: Any, loss_fn: LossFunction, names: Sequence[str], split: Split) -> Work:
        """Note everything that an attempt may change, and empty the gradients.

        Raises:
            BatchError: H204 or H205, for a batch that cannot be cut as it must be.
        """
        size = self.promises.size_of(batch, split)
        self.buffers.keep()
        tensors = tensors_in(batch)
        parameters = [
            p for name in names for group in self._parts.optimizers[name].param_groups for p in group["params"]
        ]
        for parameter in parameters:
            parameter.grad = None
        return Work(
            batch=batch,
            loss_fn=loss_fn,
            names=names,
            split=split,
            size=size,
            parameters=parameters,
            inputs=self._inputs(parameters),
            random_state=capture(self._devices),
            tensors=tensors,
            versions=versions_of(tensors),
        )

    def _inputs(self, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return where gradients may go, or None if backward reaches nothing else anyway."""
        key = [id(p) for p in parameters]
        if key != self._stepped_last:
            mine = set(key)
            self._stepped_last, self._others = key, [p for p in self._all_parameters if id(p) not in mine]
        if any(p.requires_grad for p in self._others):
            return [p for p in parameters if p.requires_grad]
        return None

    def make(self, work: Work, plan: Plan) -> Attempt:
        """Run forward and backward by a plan, and look at the gradients.

        Raises:
            BatchError: H2xx, for a loss that cannot be used.
        """
        self._prepare(work.names)
        work.prepared = True
        with self.observing():
            passed = self.run(work, plan)
        self.loss_scale.unscale(self._parts.optimizers[name] for name in work.names)
        groups = self.groups(work.names)
        if not any(group.parameters for group in groups):
            raise BatchError(
                f"no parameter of {', '.join(work.names)} received a gradient",
                limit="the loss must depend on the parameters that are stepped",
                fix="check that the loss uses the right model, that nothing on the way is detached, and that "
                "optimizer= names the right optimizer.",
                rule="H202",
            )
        self._let_state_exist(groups)
        facts, norms = inspect(groups, passed.loss)
        samples = None if work.size is None else plan.samples(work.size)
        return Attempt(
            loss=passed.loss,
            items=passed.items,
            micro_batch_size=samples,
            groups=groups,
            facts=facts,
            norms=norms,
            dropped=passed.dropped,
        )

    def run(self, work: Work, plan: Plan, *, drops: bool = True) -> Passed:
        """Run forward and backward by a plan.

        Args:
            work: The step.
            plan: How.
            drops: Whether a micro-batch whose loss is NaN or Inf is left out.

        Returns:
            The mean loss, shape ``()``, detached, and the items that it is over.
        """
        active = [block for _, block in self.blocks] if plan.recompute else []
        with recomputing(active, lambda: capture(self._devices), restore) if active else contextlib.nullcontext():
            if isinstance(work.batch, Window):
                return self._over_window(work, work.batch, plan)
            if work.size is None or plan.samples(work.size) == work.size:
                return self._passes.whole(work.batch, work.size, work.loss_fn, work.inputs)
            pieces = micro_batches(
                work.batch, work.size, plan.samples(work.size), work.split, smallest=self.promises.smallest_part()
            )
            return self._passes.parted(
                pieces, work.size, work.loss_fn, work.parameters, work.inputs, batch=work.batch, drops=drops
            )

    def _over_window(self, work: Work, window: Window, plan: Plan) -> Passed:
        """Run all batches of a window, each whole or cut as the plan says."""
        smallest = self.promises.smallest_part()
        cut: list[list[tuple[Any, int]]] = []
        for batch in window:
            size = None if work.size is None else self.promises.size_of(batch, work.split)
            fits = size is None or plan.samples(size) == size
            cut.append(
                [(batch, size or 1)]
                if size is None or fits
                else micro_batches(batch, size, plan.samples(size), work.split, smallest=smallest)
            )
        parts = [part for batch in cut for part in batch]
        if len(window) == len(parts) == 1:
            return self._passes.whole(*parts[0], work.loss_fn, work.inputs)
        if not window.added:
            samples = sum(samples for _, samples in parts)
            return self._passes.parted(parts, samples, work.loss_fn, work.parameters, work.inputs, drops=False)
        return self._passes.added(cut, work.loss_fn, work.inputs)

    def _prepare(self, names: Sequence[str]) -> None:
        """Let all state exist before the first attempt, where a lack of memory can still be helped."""
        for name in names:
            if name not in self._born:
                optimizer = self._parts.optimizers[name]
                trainable = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
                self._born[name] = create_state(optimizer, trainable)

    def _let_state_exist(self, groups: Sequence[Group]) -> None:
        """Make the state of parameters that get their first gradient late, before the step is committed."""
        for group in groups:
            optimizer = self._parts.optimizers[group.optimizer]
            if optimizer.state and len(optimizer.state) < sum(len(g["params"]) for g in optimizer.param_groups):
                missing = [p for p in group.parameters if p not in optimizer.state]
                if missing:
                    create_state(optimizer, missing)

    def drop_unused_state(self, name: str) -> None:
        """Remove what was made ahead of time for parameters that got no gradient in this optimizer's first step."""
        drop_state(self._parts.optimizers[name], [p for p in self._born[name] if p.grad is None])
        self._born[name] = []

    def groups(self, names: Sequence[str]) -> list[Group]:
        """Return the parameter groups of these optimizers, as far as they have gradients."""
        return [
            Group(f"{name}.{group.get('name', index)}", name, [p for p in group["params"] if p.grad is not None])
            for name in names
            for index, group in enumerate(self._parts.optimizers[name].param_groups)
        ]

    def restore(self, work: Work) -> None:
        """Put random state and buffers back to the beginning, and empty the gradients."""
        for parameter in work.parameters:
            parameter.grad = None
        late = self.buffers.put_back()
        if late:
            self._record.happened("buffer_not_restored", buffers=late)
        restore(work.random_state)

    def take_back(self, work: Work) -> None:
        """Leave no trace of an attempt."""
        self.restore(work)
        self.loss_scale.forget()
