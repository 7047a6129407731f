"""One attempt at a step: forward, backward, gradient norms, and restoring the state afterwards.

``engine`` decides whether to commit, skip or repeat the step. This module never changes weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from holdfast.core.errors import BatchError, PolicyError
from holdfast.core.events import run_events
from holdfast.core.events.decisions import Decision, Stop
from holdfast.guard.context import RunContext
from holdfast.guard.decision import UnreadAttempt
from holdfast.guard.result import PassResult, StepAttempt
from holdfast.guard.splitting.loss_functions import FilledOutside
from holdfast.guard.splitting.split_safety import LossFunction, SplitSafety
from holdfast.guard.splitting.split_trials import Isolation
from holdfast.guard.splitting.window import Window
from holdfast.guard.state.work import Work
from holdfast.guard.step.host_reads import HostRead, HostReads
from holdfast.guard.step.passes import Passes
from holdfast.loader.random_state import capture, restore
from holdfast.loader.splitting import Split, micro_batches, tensors_in
from holdfast.memory.blocks import find_blocks, named_submodules
from holdfast.memory.ladder import StepPlan
from holdfast.memory.recompute import recomputing
from holdfast.memory.saved_bytes import SavedBytes
from holdfast.memory.tensors import versions_of
from holdfast.numerics.eager import anything_compiled
from holdfast.numerics.gradients import Group, measure
from holdfast.numerics.loss import check_count

_NOTHING = contextlib.nullcontext()


class Attempts:
    """Makes attempts at steps, and undoes them.

    Args:
        context: The objects that the parts of the run share.
    """

    def __init__(self, context: RunContext) -> None:
        parts = context.parts
        policy = context.policy
        ranks = context.ranks
        self._parts = parts
        self._ranks = ranks
        self._record = context.record
        self._devices = parts.devices()
        self._buffers = context.buffers
        self._loss_scale = context.loss_scale
        self._created_state = context.created_state
        self._diagnosis = context.diagnosis
        self.safety = SplitSafety(
            parts,
            policy,
            context.buffers,
            context.record,
            Isolation(
                restore=self.restore,
                alone=ranks.alone,
                # In a fork of one rank's process, a trial would wait forever for the other ranks.
                may_fork=ranks.world_size == 1,
            ),
        )
        self._all_parameters = [p for _, p in parts.named_parameters()]
        self._passes = Passes(
            self.safety,
            context.loss_scale,
            parts.device_type(),
            policy.precision,
            ranks,
            self._all_parameters,
        )
        self._drops = policy.drop_nonfinite_samples
        self._policy_micro_batch_size = policy.micro_batch_size
        wanted = policy.recompute
        self._modules = (
            named_submodules(parts.models)
            if wanted is True
            else dict(find_blocks(parts.models, wanted or ()))
        )
        self._must_recompute = isinstance(wanted, tuple)
        self._measured = (
            SavedBytes(self._modules) if wanted is True and not parts.compiled else None
        )
        # Whether the newest attempt was measured.
        self._was_measured = False
        # The names of modules whose recomputation has been verified.
        self._verified = set[str]()
        self._filled_outside = FilledOutside(self._all_parameters)
        self._earlier_gradients = context.earlier_gradients
        # The number of attempts that this process has started.
        self._begun = 0
        # The number of the current attempt. None between attempts.
        self.current: int | None = None
        # Whether it is known if the loss function reads values from the device.
        self._has_looked_for_reads = False
        # The ids of the parameters that the last step updated.
        self._stepped_last: list[int] = []
        # All other parameters.
        self._others: list[torch.Tensor] = []

    @property
    def compiled(self) -> bool:
        """Return whether code in this process is compiled.

        If so, the ``forward`` of a module must not be replaced.
        """
        return self._parts.compiled or anything_compiled()

    def begin(self, batch: Any, loss_fn: LossFunction, names: Sequence[str], split: Split) -> Work:
        """Start a step: copy the state that attempts may change, and clear the gradients.

        Returns:
            The input of the step, to pass to the other methods.
        """
        self._filled_outside.check()
        size = self.safety.size_of(batch, split)
        self._buffers.capture()
        tensors = tensors_in(batch)
        parameters = [
            parameter
            for name in names
            for group in self._parts.optimizers[name].param_groups
            for parameter in group["params"]
        ]
        if len(names) > 1:
            # Two optimizers may hold the same parameter.
            parameters = list(dict.fromkeys(parameters))
        for parameter in parameters:
            parameter.grad = None
        return Work(
            batch=batch,
            loss_fn=loss_fn,
            names=names,
            split=split,
            size=size,
            parameters=parameters,
            inputs=partial(self._inputs, parameters),
            random_state=capture(self._devices),
            tensors=tensors,
            versions=versions_of(tensors),
        )

    def _inputs(self, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the parameters that may receive gradients, as ``inputs`` for ``backward``.

        Returns None if no other parameters could receive gradients, or if the ranks need the
        gradients of all parameters; see `_keeping_other_gradients`.
        """
        if self._ranks.needs_all_gradients or not self._other_trainable_parameters(parameters):
            return None
        return [p for p in parameters if p.requires_grad]

    def _other_trainable_parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that could receive gradients although no optimizer steps them.

        Args:
            parameters: The parameters that the optimizers of the current step update.
        """
        ids = list(map(id, parameters))
        if ids != self._stepped_last:
            stepped = set(ids)
            self._stepped_last = ids
            self._others = [p for p in self._all_parameters if id(p) not in stepped]
        return [p for p in self._others if p.requires_grad]

    @contextlib.contextmanager
    def _keeping_other_gradients(self, work: Work) -> Iterator[None]:
        """Leave the gradients of parameters that this step does not update unchanged.

        With several ranks, backward has to compute these gradients as well, but a single process
        would not. With ``gradient_as_bucket_view``, the gradients share memory with the buckets of
        `DistributedDataParallel`, so their values change all the same.

        Args:
            work: The input of the step.
        """
        others = []
        if self._ranks.needs_all_gradients:
            others = self._other_trainable_parameters(work.parameters)
        gradients = [other.grad for other in others]
        for other in others:
            other.grad = None
        try:
            yield
        finally:
            for other, gradient in zip(others, gradients, strict=True):
                other.grad = gradient

    def make(self, work: Work, plan: StepPlan) -> StepAttempt:
        """Run forward and backward as planned, measure the gradients, and return the result."""
        passed, groups = self._passed(work, plan)
        return self._inspected(passed, groups, self._micro_batch_size(work, plan))

    def make_unread(self, work: Work, plan: StepPlan) -> UnreadAttempt:
        """Run forward and backward as planned, without waiting for the result."""
        if self._has_looked_for_reads or self.compiled:
            passed, groups = self._passed(work, plan, reads_results=False)
        else:
            with HostReads(self._parts.device_type()) as host_reads:
                passed, groups = self._passed(work, plan, reads_results=False)
            self._report_reads(host_reads.reads)
        return UnreadAttempt(
            passed=passed,
            groups=groups,
            measurement=measure(groups, passed.loss, _unread_items(passed)),
            micro_batch_size=self._micro_batch_size(work, plan),
            items_are_of_all_ranks=self._ranks.has_group,
        )

    def _report_reads(self, reads: Sequence[HostRead]) -> None:
        """Report once that the loss function reads values from the device."""
        self._has_looked_for_reads = True
        if reads:
            first = reads[0]
            self._record.emit(
                run_events.LossFunctionReads(
                    function=first.function, file=first.file, line=first.line
                )
            )

    def read(self, attempt: UnreadAttempt) -> StepAttempt:
        """Wait for the result of an attempt whose gradients are still those of the parameters."""
        return self._inspected(attempt.passed, attempt.groups, attempt.micro_batch_size)

    def _inspected(
        self, passed: PassResult, groups: list[Group], micro_batch_size: int | None
    ) -> StepAttempt:
        """Read the loss and the norms of the gradients.

        Raises:
            BatchError: H203 if the number of items was read from the device and is not valid.
        """
        facts, norms = self._ranks.inspect_gradients(groups, passed.loss, _unread_items(passed))
        if facts.items is not None:
            # There is no mean over 0 items, so 0 is refused in the same way as NaN.
            check_count(facts.items or math.nan, counted=passed.counted)
        return StepAttempt.of(passed, groups, facts, norms, micro_batch_size)

    def _micro_batch_size(self, work: Work, plan: StepPlan) -> int | None:
        return None if work.size is None else plan.samples(work.size)

    def _passed(
        self, work: Work, plan: StepPlan, *, reads_results: bool = True
    ) -> tuple[PassResult, list[Group]]:
        """Run forward and backward as planned.

        Args:
            work: The input of the step.
            plan: The modules to recompute, and the micro-batch size.
            reads_results: Whether to wait for the results of the other ranks.

        Returns:
            The result of the passes, and the parameter groups with the parameters that have
            gradients.
        """
        self._created_state.prepare(work.names)
        work.prepared = True
        self._passes.begin_attempt()
        work.measured = False
        self._was_measured = False
        with self._keeping_other_gradients(work):
            passed = self._observed(work, plan)
        self._earlier_gradients.add_to_parameters()
        self._verified.update(plan.recompute)
        if reads_results:
            passed = self._ranks.combine(passed, work.parameters)
        else:
            passed = self._ranks.combine_without_reading(passed, work.parameters)
        if self._loss_scale.enabled:
            self._loss_scale.unscale(self._parts.optimizers, work.names)
        groups = self.groups(work.names)
        if not (groups and groups[0].parameters) and not any(group.parameters for group in groups):
            raise BatchError(
                f"no parameter of {', '.join(work.names)} received a gradient",
                limit="the loss must depend on the parameters that are stepped",
                fix=(
                    "check that the loss uses the right model, that nothing between them is"
                    " detached, and that optimizer= names the right optimizer."
                ),
                rule="H202",
            )
        self._created_state.complete(work.names)
        return passed, groups

    def _observed(self, work: Work, plan: StepPlan) -> PassResult:
        """Run forward and backward as planned, and let the diagnosis observe them if it is due."""
        observation = self._diagnosis.attempt()
        self._begun += 1
        self.current = self._begun
        try:
            if observation is None and not work.out_of_memory:
                return self.run(work, plan, verify=True)
            with observation or _NOTHING, self._measuring(work, plan):
                return self.run(work, plan, verify=True)
        finally:
            self.current = None

    # --- recomputation

    def _measuring(self, work: Work, plan: StepPlan) -> contextlib.AbstractContextManager[None]:
        """Return a context that measures how much memory recomputing each module would save.

        Only attempts after an out-of-memory error are measured, and only if the batch is not split.
        The measurement hooks saved tensors, which creates reference cycles. With micro-batches,
        these cycles would keep each micro-batch in memory until they are garbage-collected.
        """
        if not work.out_of_memory or self._measured is None or self.compiled:
            return _NOTHING
        if work.size is not None and plan.samples(work.size) != work.size:
            return _NOTHING
        self._was_measured = work.measured = True
        return self._measured.measuring(plan.recompute, work.tensors)

    def modules_to_recompute(self, plan: StepPlan) -> tuple[str, ...]:
        """Return the modules to recompute after an attempt ran out of memory.

        If the attempt measured how much memory each module keeps, modules may be added to
        `plan.recompute`. If it was not measured, or if more modules would not help, the result is
        `plan.recompute` itself. For compiled models, whose modules cannot be recomputed, the result
        is empty.
        """
        if self.compiled:
            return ()
        if self._measured is None or not self._was_measured:
            return plan.recompute
        return self._measured.choose(plan.recompute)

    def give_up_measuring(self, error: str) -> None:
        """Stop measuring memory, so that no more modules are chosen for recomputation.

        Args:
            error: Why the measurement has failed.
        """
        self._measured = None
        why = f"the memory that modules keep could not be measured: {error}"
        self._record.emit(run_events.RecomputeImpossible(why=why[:300]))

    def give_up_recomputing(self, plan: StepPlan, block: nn.Module | None, why: str) -> None:
        """Stop recomputing a module that cannot be recomputed.

        Args:
            plan: The plan of the attempt.
            block: The module. None stops the recomputation of all modules in the plan.
            why: Why the module cannot be recomputed.
        """
        failing = [
            name for name in plan.recompute if block is None or self._modules.get(name) is block
        ]
        if self._measured is not None:
            self._measured.refuse(failing)
        self._record.emit(run_events.RecomputeImpossible(why=why, modules=tuple(failing)))

    def _check_recompute(self) -> None:
        """Raise H102 if the policy names modules to recompute, but code is compiled."""
        if self._must_recompute and self.compiled:
            raise PolicyError(
                "recompute names modules, but this process uses torch.compile",
                limit="a compiled graph ignores later changes to its modules",
                fix=(
                    "use torch.utils.checkpoint in forward, which is compiled with it, and omit"
                    " recompute=."
                ),
                rule="H102",
            )

    # --- forward and backward

    def run(
        self, work: Work, plan: StepPlan, *, drops: bool = True, verify: bool = False
    ) -> PassResult:
        """Run forward and backward as planned.

        Args:
            work: The input of the step.
            plan: The modules to recompute, and the micro-batch size.
            drops: Whether micro-batches with a loss of NaN or Inf may be left out.
            verify: Whether to verify, once for each module, that it can be recomputed.
        """
        if not plan.recompute and not self._must_recompute:
            return self._run_passes(work, plan, drops=drops)
        self._check_recompute()
        wanted = () if self.compiled else plan.recompute
        active = {name: self._modules[name] for name in wanted if name in self._modules}
        context: contextlib.AbstractContextManager[None] = _NOTHING
        if active:
            new = [block for name, block in active.items() if verify and name not in self._verified]
            context = recomputing(
                list(active.values()), lambda: capture(self._devices), restore, verify=new
            )
        with context:
            passed = self._run_passes(work, plan, drops=drops)
        # The passes may have compiled code, so check again.
        self._check_recompute()
        return passed

    def _run_passes(self, work: Work, plan: StepPlan, *, drops: bool) -> PassResult:
        """Run forward and backward over the whole batch or over micro-batches, as planned."""
        if isinstance(work.batch, Window):
            return self._run_window(work, work.batch, plan)
        if (
            work.size is None
            or plan.micro_batch_size is None
            or plan.samples(work.size) == work.size
        ):
            return self._passes.whole(work.batch, work.size, work.loss_fn, work.inputs)
        pieces = self._cut(work.batch, work.size, work.split, plan)
        with self._ranks.no_sync(only_this_rank=self._splits_for_memory(plan)):
            passed = self._passes.parted(
                pieces,
                work.loss_fn,
                work.parameters,
                work.inputs,
                batch=work.batch,
                drops=drops and self._drops,
            )
        return self._ranks.reduce_gradients(passed, work.parameters)

    def _splits_for_memory(self, plan: StepPlan) -> bool:
        """Return whether this rank splits batches because it ran out of memory.

        This is False if the micro-batch size was set by the policy.
        """
        return plan.micro_batch_size not in (None, self._policy_micro_batch_size)

    def _cut(self, batch: Any, size: int, split: Split, plan: StepPlan) -> list[tuple[Any, int]]:
        """Return the micro-batches of a batch, with the number of samples in each."""
        return micro_batches(
            batch, size, plan.samples(size), split, smallest=self.safety.smallest_part()
        )

    def _run_window(self, work: Work, window: Window, plan: StepPlan) -> PassResult:
        """Run all batches of a window, each in one pass or in micro-batches, as planned."""
        cut: list[list[tuple[Any, int]]] = []
        for batch in window:
            size = None if work.size is None else self.safety.size_of(batch, work.split)
            if size is None or plan.samples(size) == size:
                cut.append([(batch, size or 1)])
            else:
                cut.append(self._cut(batch, size, work.split, plan))
        parts = [part for batch in cut for part in batch]
        if len(window) == len(parts) == 1:
            batch, samples = parts[0]
            # With `added`, all ranks have the same weight, so the number of samples is not passed
            # on.
            counts_equally = window.added and self._ranks.world_size > 1
            return self._passes.whole(
                batch, None if counts_equally else samples, work.loss_fn, work.inputs
            )
        with self._ranks.no_sync(only_this_rank=self._splits_for_memory(plan)):
            if window.added:
                passed = self._passes.added(cut, work.loss_fn, work.inputs)
            else:
                passed = self._passes.parted(
                    parts, work.loss_fn, work.parameters, work.inputs, drops=False
                )
        return self._ranks.reduce_gradients(passed, work.parameters, added=window.added)

    def groups(self, names: Sequence[str]) -> list[Group]:
        """Return the parameter groups of these optimizers, with the parameters that have gradients.

        A parameter that is in two optimizers appears only once.
        """
        groups = []
        earlier = set[torch.Tensor]()
        for name in names:
            for index, group in enumerate(self._parts.optimizers[name].param_groups):
                parameters = [p for p in group["params"] if p.grad is not None]
                if len(names) > 1:
                    # Two optimizers may hold the same parameter.
                    parameters = [p for p in parameters if p not in earlier]
                    earlier.update(parameters)
                groups.append(Group(f"{name}.{group.get('name', index)}", name, parameters))
        return groups

    def begin_again(self, work: Work) -> None:
        """Copy the state that attempts may change, and clear the gradients, as `begin` does."""
        self._buffers.capture()
        for parameter in work.parameters:
            parameter.grad = None
        work.random_state = capture(self._devices)

    # --- undoing an attempt

    def restore(self, work: Work) -> None:
        """Restore the random state and buffers from the start of the step, and clear gradients."""
        for parameter in work.parameters:
            parameter.grad = None
        late = self._buffers.restore()
        if late:
            self._record.emit(run_events.NotRestored(names=tuple(late)))
            work.lost += late
        restore(work.random_state)

    def take_back(self, work: Work) -> None:
        """Restore everything that an attempt has changed."""
        self.restore(work)
        self._loss_scale.forget()

    def with_kept_promise(self, decision: Decision, work: Work) -> Decision:
        """Return a decision to repeat an attempt, with a promise that the attempt can keep.

        If the loss function changes state that could not be restored, the promise is lowered to
        "changes training".
        """
        lost = [*dict.fromkeys([*work.lost, *self.safety.side_effects(work)])]
        if not lost or isinstance(decision, Stop):
            return decision
        reason = (
            f"{decision.reason}; the loss function changes state that is not restored:"
            f" {', '.join(lost[:5])}"
        )
        return replace(decision, reason=reason, promise="changes training")

    def note_changes(self, work: Work) -> None:
        """Determine which buffers and states have changed in an attempt that will be committed."""
        late = [name for name in self._buffers.learn() if name in self._buffers.states.names()]
        # If an object changes for the first time, there was no copy of it, so it was not restored
        # between the attempts.
        if late and work.attempts > 1:
            self._record.emit(run_events.NotRestored(names=tuple(late)))


def _unread_items(passed: PassResult) -> torch.Tensor | None:
    """Return the number of items if it is on a device, to be read together with the norms."""
    return passed.items if isinstance(passed.items, torch.Tensor) else None
