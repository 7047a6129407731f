"""A model in DistributedDataParallel.

Each rank holds all of it, and gradients are averaged in backward.

In each attempt every rank begins the same collectives: buffers, the row, the buckets of gradients.
A rank that cannot come to some of them by running its model begins them by hand: it pays what it
owes. How many it has begun is counted by the group itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from holdfast.guard.ranks.collectives import NoCollectives
from holdfast.guard.ranks.tape import ROW, Tape
from holdfast.memory.oom import find_out_of_memory

# Hooks that keep nothing from step to step. Others, such as PowerSGD's, would keep the NaN of a
# failed attempt.
_STATELESS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)

# True: a static graph has made its first pass, at the end of which torch talks to the others.
_ENQUEUED = "_static_graph_delay_allreduce_enqueued"


class Replicated:
    """One wrapped model."""

    why_not_alone = None
    norms = shares = None
    unobserved: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, wrapper: DistributedDataParallel, name: str) -> None:
        self._wrapper: Any = wrapper  # much of it has no types
        self._name = name
        self.ignored = [f"{name}.{key}" for key in sorted(wrapper.parameters_to_ignore)]
        self.group: Any = wrapper.process_group
        self.device: torch.device = next(wrapper.parameters()).device
        self._broadcasts: bool = wrapper.broadcast_buffers
        self._after_row = self._attempts = 0
        # The order in which the gradients of the first step were there: torch lays its buckets out
        # by it.
        self._order: list[int] = []
        self._noting: list[Any] = []
        # Two add up to the same in any order.
        if self.group.size() > 2 and not (wrapper.find_unused_parameters or wrapper.static_graph):
            self._noting = [
                parameter.register_post_accumulate_grad_hook(
                    lambda _, at=at: self._order.append(at)
                )  # type: ignore[no-untyped-call]
                for at, parameter in enumerate(self._trained())
            ]
        self.refused = {"micro_batch_size": ("auto", None)} if wrapper.static_graph else {}
        self.scales = False  # losses, as fp16 needs it
        # Whether backward contains collectives of the loss or the model; None before the first step
        # has shown it.
        self._talks_in_backward: bool | None = None
        # How many reductions of gradients torch begins in a step.
        self._reductions = 0

    def record(self, tape: Tape) -> None:
        """Record the collectives of this rank on a tape from now on."""
        self._tape = tape

    # --- what was begun

    def begin(self) -> None:
        """Begin an attempt, on all ranks, with the buffers of the first.

        They are sent here, and not by each call of the model: a rank that fails does not know how
        many others make.
        """
        wrapper = self._wrapper
        self._attempts += 1
        self.rebuild()
        if self._noting:
            self._order.clear()
        wrapper.broadcast_buffers = self._broadcasts
        # The first call of an evaluation has sent the buffers, and torch does not send them again
        # after it. Where one rank has evaluated alone, the others are here when they take part in
        # that.
        if wrapper.will_sync_module_buffers():
            wrapper._sync_buffers()
        wrapper.broadcast_buffers = False
        self._tape.begin()

    def row_begins(self) -> None:
        """Note that the row is about to be exchanged.

        Torch's reductions of gradients follow, which are not noted.
        """
        self._tape.collectives.settle()
        self._tape.note(self.group, ROW)

    def keeps_apart(self, name: str) -> bool:
        """Return whether a buffer or a frozen weight may differ between ranks, because it is not
        broadcast.

        A user's buffer hook may set the buffers to any value, so with one they count as different.
        """
        wrapper = self._wrapper
        own_name = name.removeprefix(f"{self._name}.")
        if own_name == name or own_name in wrapper.parameters_to_ignore:
            return True
        return not self._broadcasts or hasattr(wrapper, "buffer_hook")

    def row_begun(self) -> None:
        """Note that the row is under way."""
        self._after_row = self._count()

    def end(self) -> None:
        """Let calls of the model send buffers again, as those of an evaluation do."""
        self._wrapper.broadcast_buffers = self._broadcasts
        # Forward passes without gradients have cleared this flag, which may differ on a rank that
        # has failed.
        self._wrapper.require_forward_param_sync = True
        self._note_no_more()
        self._tape.end()

    def _note_no_more(self) -> None:
        for hook in self._noting:
            hook.remove()
        self._noting = []

    @property
    def sends_before_row(self) -> bool:
        """Return whether an attempt broadcasts buffers before it exchanges the row."""
        return self._broadcasts and len(self._wrapper.modules_buffers) > 0

    @property
    def order(self) -> list[int]:
        """Return the order of gradients that the buckets are laid out by.

        Empty if it is not known or not needed.
        """
        return self._order if sorted(self._order) == list(range(len(self._trained()))) else []

    def lay_out(self, order: list[int]) -> None:
        """Let the buckets be laid out by an order, on all ranks.

        Else the sums of the next step have other bits.

        Without effect after the first step of this process, which has laid them out.
        """
        parameters = self._trained()
        if not self._noting or len(order) != len(parameters):
            return
        self._note_no_more()
        self._order = order
        self._wrapper.reducer.prepare_for_forward()
        self._wrapper.reducer.prepare_for_backward([])
        with _without_hooks(parameters):
            for at in order:  # one by one: of several at once the order is that of the engine
                torch.autograd.backward(parameters[at], torch.zeros_like(parameters[at]))
        for parameter in parameters:
            parameter.grad = None

    def _count(self) -> int:
        return int(self.group._get_sequence_number_for_group())

    @property
    def why_not_apart(self) -> str | None:
        """Return what cannot be done in parts, or None."""
        if self._wrapper.static_graph and not getattr(self._wrapper, _ENQUEUED):
            return "a first step in several parts, by which torch cannot learn a static_graph,"
        return None

    # --- collectives of the loss or the model
    # ------------------------------------------------------------------

    def own_collectives(self) -> int:
        """Return how many collectives of the loss or the model a whole attempt has begun."""
        in_forward = self._tape.collectives.begun().total()
        in_backward = self._in_backward()
        if in_backward is not None:
            self._talks_in_backward = bool(in_backward or self._talks_in_backward)
        return in_forward + (in_backward or 0)

    def _in_backward(self) -> int | None:
        """Return how many collectives of the loss or the model backward has begun.

        None if that is not known.
        """
        if self._learns_graph:
            return None
        late = self._tape.collectives.begun_since_settled()
        on_own_group = late.pop(self.group.group_name, 0)
        if on_own_group != self._reductions:
            reductions = self._count_reductions(on_own_group)
            if reductions is None:
                return None
            self._reductions = reductions
        return late.total() + on_own_group - self._reductions

    def _count_reductions(self, seen: int) -> int | None:
        """Return how many reductions of gradients torch begins in a backward pass, or None if that
        is not known.

        Args:
            seen: How many collectives were begun on the group of the wrapper. If torch's log
                confirms that all of them were reductions, no buckets have to be allocated to count
                them.
        """
        if self._unknown_hook() is not None:
            return None
        of_unused = int(self._wrapper.find_unused_parameters and not self._wrapper.static_graph)
        logged = self._wrapper._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
        if len(sizes.split(",")) + of_unused == seen:
            return seen
        # The log may be that of an earlier step. The buckets themselves are certain, but allocate
        # memory.
        try:
            return len(self._wrapper.reducer._get_zeros_like_grad_buckets()) + of_unused
        except RuntimeError as error:
            if find_out_of_memory(error) is None:
                raise
            return None

    # --- what is owed

    def why_unpayable(self) -> str | None:
        """Return why nobody but torch can begin the reductions of this model; None: we can."""
        if self._learns_graph:
            return "torch was learning the static graph, and nobody can make it forget half of it"
        if self._talks_in_backward:
            return "the loss or the model begins collectives in backward, among those of torch"
        hook = self._unknown_hook()
        if hook is not None:
            return f"the communication hook {hook!r} may keep what a failed attempt has left"
        return None

    @property
    def _learns_graph(self) -> bool:
        """Return whether torch records the static graph in this attempt."""
        return bool(self._wrapper.static_graph and self._attempts == 1)

    def _unknown_hook(self) -> str | None:
        """Return the name of a communication hook with unknown state or collectives, or None."""
        hooks = [hook for hook, _ in self._wrapper._comm_hooks]
        if hooks and all(hook in _STATELESS for hook in hooks):
            return None
        name: str | None = self._wrapper._get_ddp_logging_data().get("comm_hook")
        return name

    def wait_for_others(self) -> str | None:
        """Wait until the other ranks have completed their forward passes.

        Returns:
            None, or a sentence that says why this rank cannot begin the collectives that the others
            wait in.
        """
        obstacle = self._tape.wait_for_row()
        if obstacle is None and self._talks_in_backward is None and self._tape.collectives.begun():
            return (
                "it is not known yet whether the loss or the model also begins collectives in"
                " backward"
            )
        return obstacle

    def pay_nan(self) -> bool:
        """Begin all reductions of gradients that are owed after the row, of NaN.

        Return whether there were any.
        """
        buckets = self._wrapper.reducer._get_zeros_like_grad_buckets()
        owed = buckets[self._count() - self._after_row :]
        for bucket in owed:
            bucket.buffer().fill_(math.nan)
        self._reduce(owed)
        return bool(owed)

    def pay_own(self) -> None:
        """Reduce the gradients that this rank has; they are then those of all ranks.

        They are given to the reducer as a backward pass would give them: which of them lie in which
        bucket only it knows for sure.
        """
        begun, reducer = self._count(), self._wrapper.reducer
        parameters = [p for p in self._trained() if p.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        reducer.prepare_for_forward()
        outputs = []
        if self._wrapper.find_unused_parameters:
            with torch.enable_grad():  # it looks from here for what is used
                outputs = [torch.stack([p.reshape(-1)[0].double() for p in parameters]).sum()]
        reducer.prepare_for_backward(outputs)
        for parameter in parameters:
            parameter.grad = None
        with _without_hooks(parameters):  # they have seen these gradients, part by part
            torch.autograd.backward(parameters[::-1], gradients[::-1])
        if self._count() == begun:
            raise RuntimeError(
                "DistributedDataParallel has not reduced the gradients that it was given"
            )

    def _reduce(self, buckets: list[Any]) -> None:
        wrapper = self._wrapper
        if wrapper._comm_hooks:
            ((hook, state),) = wrapper._comm_hooks
            sent = [hook(state, bucket) for bucket in buckets]
        else:
            sent = [self._begin_sum(each.buffer()) for each in buckets]
        if wrapper.find_unused_parameters:
            sent.append(
                self._begin_sum(
                    torch.zeros(len(self._trained()), dtype=torch.int32, device=self.device)
                )
            )
        for work in sent:
            work.wait()

    def _begin_sum(self, tensor: torch.Tensor) -> Any:
        return distributed.all_reduce(tensor, group=self.group, async_op=True)

    def _trained(self) -> list[torch.Tensor]:
        return [
            parameter for parameter in self._wrapper.module.parameters() if parameter.requires_grad
        ]

    def reset(self) -> None:
        """Forget an attempt that one rank has not made, on all ranks."""
        self._tape.count_failed_attempt()
        self._wrapper.reducer._reset_state()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let backward reduce nothing.

        Its gradients are paid at once, when all parts of a batch are through.
        """
        with self._wrapper.no_sync():
            yield

    def rebuild(self) -> None:
        """Let the reducer rebuild its buckets now, if that is due.

        All ranks do so at the same place.

        It is due at the first forward after the first step; left to that, a rank that runs alone
        would wait for ever.
        """
        self._wrapper.reducer._rebuild_buckets()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let forward and backward talk to no other rank."""
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
            # Else what was used now counts as used in the next step
            if wrapper.find_unused_parameters:
                wrapper.reducer._reset_state()


@contextlib.contextmanager
def _without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    held = [
        hooks
        for p in parameters
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        if hooks
    ]
    kept = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(held, kept, strict=True):
            hooks.update(own)
