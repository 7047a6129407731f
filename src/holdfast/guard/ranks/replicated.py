"""A model in DistributedDataParallel: each rank holds a replica, and backward averages gradients.

In each attempt, all ranks start the same collectives: the broadcast of buffers, the exchange of
rows, and the reductions of gradient buckets. If a rank fails before it has started all of them, it
starts the remaining ones by hand, since the other ranks are waiting in these collectives. The
process group counts how many of them the rank has started.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from holdfast.guard.ranks.collectives import NoCollectives
from holdfast.guard.ranks.distributed_model import DistributedModel
from holdfast.guard.ranks.gradient_order import (
    GradientOrder,
    trained_parameters,
    without_hooks,
)
from holdfast.guard.ranks.tape import ROW, Entry, Tape
from holdfast.memory.oom import find_out_of_memory

# Communication hooks that keep no state between steps. Other hooks, such as PowerSGD's, would keep
# NaN from a failed attempt.
_STATELESS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)

# The name of an attribute of the wrapper, which is True after the first pass with a static graph.
# At the end of that pass, torch starts collectives.
_ENQUEUED = "_static_graph_delay_allreduce_enqueued"


@final
class ReplicatedModel(DistributedModel):
    """The model in DistributedDataParallel. Used by `DdpRanks`.

    Args:
        wrapper: The DistributedDataParallel module.
        name: The name of the model.
        tape: Records the collectives of this rank.
    """

    def __init__(self, wrapper: DistributedDataParallel, name: str, tape: Tape) -> None:
        super().__init__(wrapper.process_group, next(wrapper.parameters()).device)
        # The wrapper lacks many type annotations.
        self._wrapper: Any = wrapper
        self._name = name
        self.ignored = [f"{name}.{key}" for key in sorted(wrapper.parameters_to_ignore)]
        self._tape = tape
        self._broadcasts: bool = wrapper.broadcast_buffers
        # The group's sequence number right after the exchange of rows was started.
        self._sequence_after_row = 0
        self._attempts = 0
        self._gradient_order = GradientOrder(wrapper)
        # Whether the loss or the model starts collectives in backward. None until the first step
        # has shown this.
        self._has_collectives_in_backward: bool | None = None
        # Whether torch has still to rebuild its buckets, in the order of the gradients.
        self._must_rebuild: bool = wrapper.static_graph or not wrapper.find_unused_parameters
        # Why a step must be decided before its optimizer runs, once the hooks have been checked.
        self._why_decide_now: str | None = None
        self._has_checked_hook = False
        # How many gradient reductions torch starts in a step.
        self._reductions = 0

    @property
    def allowed_values(self) -> Mapping[str, Sequence[Any]]:
        """Return the policy fields that this model restricts, mapped to their allowed values."""
        return {"micro_batch_size": ("auto", None)} if self._wrapper.static_graph else {}

    @property
    def policy_overrides(self) -> Mapping[str, Any]:
        """Return an empty mapping, since a replica supports the same policies as one process."""
        return {}

    @property
    def why_not_split(self) -> str | None:
        """Return the reason why a batch cannot be split with this model, or None."""
        if self._wrapper.static_graph and not getattr(self._wrapper, _ENQUEUED):
            return "a first step in several parts, from which torch cannot record a static_graph,"
        return None

    @property
    def why_decide_now(self) -> str | None:
        """Return why the result of a step must be read before its optimizer runs, or None.

        The result is empty until torch has rebuilt its buckets. All ranks do this together, after
        an attempt that has succeeded on all of them.
        """
        if self._must_rebuild:
            return ""
        if self._attempts and not self._has_checked_hook:
            # A hook can be registered only before the first backward pass.
            self._has_checked_hook = True
            hook = self._unknown_hook()
            if hook is not None:
                self._why_decide_now = (
                    f"the communication hook {hook!r} may keep state from a step that is refused"
                )
        return self._why_decide_now

    # --- an attempt

    def begin_attempt(self) -> None:
        """Start an attempt, and give all ranks the buffers of the first rank.

        The buffers are broadcast once here rather than in each call of the model, because a rank
        that fails cannot know how often the other ranks call it.
        """
        wrapper = self._wrapper
        self._attempts += 1
        self.rebuild()
        self._gradient_order.begin_attempt()
        wrapper.broadcast_buffers = self._broadcasts
        # In an evaluation, the first call of the model broadcasts the buffers. After that, torch
        # does not send them again. If only one rank has evaluated the model, this call makes the
        # other ranks take part in its broadcast.
        if wrapper.will_sync_module_buffers():
            wrapper._sync_buffers()
        wrapper.broadcast_buffers = False
        self._tape.begin()

    def before_row(self) -> None:
        """Record that this rank is about to send its row to the other ranks.

        From here on, collectives are no longer counted, because torch's gradient reductions follow.
        """
        self._tape.collectives.freeze()
        self._tape.note(self.group, Entry(ROW))

    def after_row(self) -> None:
        """Record that this rank has started to send its row to the other ranks."""
        self._sequence_after_row = self._sequence_number()

    def end_attempt(self) -> None:
        """End an attempt, and let the wrapper broadcast buffers again, as evaluations require."""
        self._wrapper.broadcast_buffers = self._broadcasts
        # Forward passes without gradients clear this flag. Without this line, its value might be
        # different on a rank that has failed.
        self._wrapper.require_forward_param_sync = True
        self._gradient_order.end_recording()
        self._tape.end()

    @property
    def sends_before_row(self) -> bool:
        """Return whether an attempt broadcasts buffers before the ranks exchange their rows."""
        return self._broadcasts and len(self._wrapper.modules_buffers) > 0

    def _sequence_number(self) -> int:
        """Return how many collectives this rank has started on the wrapper's group."""
        return int(self.group._get_sequence_number_for_group())

    # --- state

    def may_differ(self, name: str) -> bool:
        """Return whether a buffer or a frozen weight may differ between ranks.

        It may differ if it is not broadcast, or if the user has registered a buffer hook, which may
        set buffers to any value.
        """
        wrapper = self._wrapper
        own_name = name.removeprefix(f"{self._name}.")
        if own_name == name or own_name in wrapper.parameters_to_ignore:
            return True
        return not self._broadcasts or hasattr(wrapper, "buffer_hook")

    @property
    def gradient_order(self) -> list[int]:
        """Return the order in which the gradients are summed; see `GradientOrder`."""
        return self._gradient_order.recorded()

    def lay_out_gradients(self, order: list[int]) -> None:
        """Make torch sum the gradients in the order of an earlier process.

        Args:
            order: The value of `gradient_order` in that process.
        """
        self._gradient_order.restore(order)

    # --- collectives that the loss or the model starts

    def own_collectives(self) -> int:
        """Return how many collectives the loss or the model started in a complete attempt."""
        in_forward = self._tape.collectives.started().total()
        in_backward = self._collectives_in_backward()
        if in_backward is not None:
            self._has_collectives_in_backward = bool(
                in_backward or self._has_collectives_in_backward
            )
        return in_forward + (in_backward or 0)

    def _collectives_in_backward(self) -> int | None:
        """Return how many collectives the loss or the model has started in backward.

        Returns None if the number is unknown.
        """
        if self._records_graph:
            return None
        late = self._tape.collectives.started_since_frozen()
        on_own_group = late.pop(self.group.group_name, 0)
        if on_own_group != self._reductions:
            reductions = self._count_reductions(on_own_group)
            if reductions is None:
                return None
            self._reductions = reductions
        return late.total() + on_own_group - self._reductions

    def _count_reductions(self, seen: int) -> int | None:
        """Return how many gradient reductions torch starts in a backward pass.

        Returns None if the number is unknown.

        Args:
            seen: How many collectives were started on the wrapper's group. If torch's log confirms
                that all of them were reductions, the buckets need not be allocated to count them.
        """
        if self._unknown_hook() is not None:
            return None
        # To find unused parameters, torch also reduces a tensor that marks the used ones.
        of_unused = int(self._wrapper.find_unused_parameters and not self._wrapper.static_graph)
        logged = self._wrapper._get_ddp_logging_data()
        # torch logs the sizes of the buckets as a comma-separated list.
        sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
        if len(sizes.split(",")) + of_unused == seen:
            return seen
        # The log may come from an earlier step. The buckets themselves are reliable, but creating
        # them needs memory.
        try:
            return len(self._wrapper.reducer._get_zeros_like_grad_buckets()) + of_unused
        except RuntimeError as error:
            if find_out_of_memory(error) is None:
                raise
            return None

    # --- after a failed attempt

    def why_not_completable(self) -> str | None:
        """Return why this model's reductions cannot be started by hand, or None if they can."""
        if self._records_graph:
            return "torch was recording the static graph, which cannot be interrupted"
        if self._has_collectives_in_backward:
            return "the loss or the model starts collectives in backward, between those of torch"
        hook = self._unknown_hook()
        if hook is not None:
            return f"the communication hook {hook!r} may keep state from a failed attempt"
        return None

    @property
    def _records_graph(self) -> bool:
        """Return whether torch is recording the static graph in this attempt."""
        return bool(self._wrapper.static_graph and self._attempts == 1)

    def _unknown_hook(self) -> str | None:
        """Return the name of a communication hook that may have state or collectives, or None."""
        hooks = [hook for hook, _ in self._wrapper._comm_hooks]
        if hooks and all(hook in _STATELESS for hook in hooks):
            return None
        name: str | None = self._wrapper._get_ddp_logging_data().get("comm_hook")
        return name

    def wait_for_others(self) -> str | None:
        """Wait until the other ranks have completed their forward passes.

        Returns:
            None, or why this rank cannot start the collectives in which the others are waiting.
        """
        obstacle = self._tape.wait_for_row()
        if (
            obstacle is None
            and self._has_collectives_in_backward is None
            and self._tape.collectives.started()
        ):
            return (
                "it is still unknown whether the loss or the model also starts collectives in"
                " backward"
            )
        return obstacle

    def reduce_nan(self) -> bool:
        """Start the gradient reductions that this attempt still lacks, with NaN as input.

        Returns:
            Whether any reductions were missing.
        """
        buckets = self._wrapper.reducer._get_zeros_like_grad_buckets()
        # Each collective that this rank has started since its row has reduced one bucket.
        missing = buckets[self._sequence_number() - self._sequence_after_row :]
        for bucket in missing:
            bucket.buffer().fill_(math.nan)
        self._reduce(missing)
        return bool(missing)

    def reduce_gradients(self) -> None:
        """Average the gradients of all ranks, after passes in which they were not reduced.

        The gradients are passed to the reducer as in a backward pass, because only the reducer
        knows the bucket of each gradient.
        """
        begun = self._sequence_number()
        reducer = self._wrapper.reducer
        parameters = [p for p in trained_parameters(self._wrapper) if p.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        reducer.prepare_for_forward()
        outputs = []
        if self._wrapper.find_unused_parameters:
            # The reducer searches the outputs' graph for the parameters that are used.
            with torch.enable_grad():
                outputs = [torch.stack([p.reshape(-1)[0].double() for p in parameters]).sum()]
        reducer.prepare_for_backward(outputs)
        for parameter in parameters:
            parameter.grad = None
        # The parameters' hooks have already run for each part of the batch.
        with without_hooks(parameters):
            torch.autograd.backward(parameters[::-1], gradients[::-1])
        if self._sequence_number() == begun:
            raise RuntimeError(
                "DistributedDataParallel did not reduce the gradients that were passed to it"
            )

    def _reduce(self, buckets: list[Any]) -> None:
        # Start the same reductions as torch would for these buckets, and wait for them.
        wrapper = self._wrapper
        if wrapper._comm_hooks:
            ((hook, state),) = wrapper._comm_hooks
            sent = [hook(state, bucket) for bucket in buckets]
        else:
            sent = [self._begin_sum(bucket.buffer()) for bucket in buckets]
        if wrapper.find_unused_parameters:
            count = len(trained_parameters(wrapper))
            are_used = torch.zeros(count, dtype=torch.int32, device=self.device)
            sent.append(self._begin_sum(are_used))
        for work in sent:
            work.wait()

    def _begin_sum(self, tensor: torch.Tensor) -> Any:
        return distributed.all_reduce(tensor, group=self.group, async_op=True)

    def discard_attempt(self) -> None:
        """Discard an attempt that has failed on at least one rank.

        torch then rebuilds its buckets after the next attempt, which involves all ranks.
        """
        self._wrapper.reducer._reset_state()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which passes over the parts of a batch do not reduce gradients.

        The gradients are reduced once, by `reduce_gradients`, after the last part.
        """
        with self._wrapper.no_sync():
            yield

    def rebuild(self) -> None:
        """Make the reducer rebuild its buckets now, if this is due.

        torch rebuilds them in the first forward pass after the first step, and waits for all ranks.
        A rank that runs its model alone at that point would wait forever. Therefore, all ranks call
        this method at the same point.
        """
        if self._wrapper.reducer._rebuild_buckets():
            self._must_rebuild = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context for forward and backward passes without communication between ranks."""
        wrapper = self._wrapper
        quiet = {
            "require_backward_grad_sync": False,
            "require_forward_param_sync": False,
            _ENQUEUED: True,
        }
        before = {name: getattr(wrapper, name, None) for name in quiet}
        vars(wrapper).update(quiet)
        try:
            with NoCollectives():  # type: ignore[no-untyped-call]
                yield
        finally:
            vars(wrapper).update(before)
            # Otherwise, parameters that were used here would count as used in the next step.
            if wrapper.find_unused_parameters:
                wrapper.reducer._reset_state()
