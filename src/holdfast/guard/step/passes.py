"""Run forward and backward over a batch, in one pass or in several with the same gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from holdfast.core.errors import BatchError
from holdfast.core.policy.kinds import Precision
from holdfast.guard.precision import autocast
from holdfast.guard.ranks.interface import Ranks
from holdfast.guard.ranks.single_process import SingleProcess
from holdfast.guard.result import PassResult
from holdfast.guard.splitting.loss_functions import weights_stay
from holdfast.guard.splitting.split_safety import LossFunction, SplitSafety
from holdfast.guard.splitting.two_pass import Inputs, TwoPass, TwoPassRun
from holdfast.guard.splitting.weighting import Weighting, shares
from holdfast.guard.state.loss_scale import LossScale
from holdfast.loader.random_state import capture, restore
from holdfast.loader.splitting import fresh
from holdfast.numerics.loss import Terms, bad_items, put_together, read_loss, without_graph

_Parts: TypeAlias = Sequence[tuple[Any, int]]


class EmptyPartError(Exception):
    """A micro-batch declares that it has no items, but its loss is not zero.

    A trial must show whether the micro-batch can be left out.

    Args:
        place: The position of the micro-batch's first sample in the batch.
    """

    def __init__(self, place: int) -> None:
        super().__init__("a part without items has a loss")
        self.place = place


class Passes:
    """Runs loss functions and backward passes.

    Args:
        safety: Decides for each loss function whether batches may be split.
        loss_scale: The loss scaling for fp16.
        device_type: The kind of device, such as ``"cuda"``.
        precision: The precision of the forward pass.
        ranks: The ranks of the run. None for a single process.
        parameters: The parameters of all models, whose hooks are checked in the first attempt.
    """

    def __init__(
        self,
        safety: SplitSafety,
        loss_scale: LossScale,
        device_type: str,
        precision: Precision,
        ranks: Ranks | None = None,
        parameters: Sequence[torch.Tensor] = (),
    ) -> None:
        self._safety = safety
        self._ranks: Ranks = SingleProcess() if ranks is None else ranks
        self._loss_scale = loss_scale
        self._device_type = device_type
        self._precision: Precision = precision
        self._devices = safety.parts.devices()
        # The parameters whose hooks have not been checked yet, and the parameters to check in this
        # attempt.
        self._unchecked = parameters
        self._watched: Sequence[torch.Tensor] = ()

    def begin_attempt(self) -> None:
        """Select the parameters whose hooks are checked: all in the first attempt, then none.

        The check takes some time per parameter, so it is not repeated.
        """
        self._watched = self._unchecked
        self._unchecked = ()

    def whole(
        self, batch: Any, size: int | None, loss_fn: LossFunction, inputs: Inputs
    ) -> PassResult:
        """Run forward and backward over the whole batch, bit-identical to an unguarded loop.

        The guard adds no arithmetic of its own.
        """
        terms = self._forward(batch, size, loss_fn)
        if terms.declared:
            terms.check_items()
        loss = self._ranks.weighted_loss(terms)
        self._backward(loss, inputs())
        return PassResult(loss.detach(), terms.items[0], (), terms.counted, terms.extra)

    def parted(
        self,
        parts: _Parts,
        loss_fn: LossFunction,
        parameters: Sequence[torch.Tensor],
        inputs: Inputs,
        *,
        batch: Any = None,
        drops: bool = True,
    ) -> PassResult:
        """Run a pass for each part, weighted by the part's share of the items.

        The number of items in a part is known only after its forward pass. The weights are
        therefore relative to an estimate of the total, and the gradients are corrected once at the
        end. For a loss with several terms, this is impossible, because ``.grad`` holds the sum over
        all terms. The items of all terms are therefore counted beforehand, in forward passes
        without a graph.

        This synchronizes with the device once per part.

        Args:
            parts: The micro-batches, with the number of samples in each.
            loss_fn: The loss function.
            parameters: The parameters that receive gradients.
            inputs: Function that returns the ``inputs`` argument for ``backward``.
            batch: The whole batch. None for a window of several batches.
            drops: Whether parts with a loss of NaN or Inf may be left out.

        Returns:
            The result over all parts that were not left out.
        """
        if isinstance(loss_fn, TwoPass):
            terms = self._in_two_passes(loss_fn, batch, parts, inputs)
            self._ranks.check_terms(terms)
            return PassResult(terms.total().detach(), terms.read()[1][0])
        tried = self._safety.may_skip_empty(loss_fn)
        extra: list[tuple[int | None, Any]] = []
        size = sum(samples for _, samples in parts)
        tally = _Tally(self._safety.weighting(loss_fn), size, drops=drops, empty_is_tried=tried)
        for index, (part, samples) in enumerate(parts):
            if index:
                self._ranks.check_parts()
            terms = self._forward(part, samples, loss_fn)
            self._ranks.check_terms(terms)
            # The items of the remaining parts are counted only if the loss has several terms.
            weights = tally.weigh(
                terms, part, samples, partial(self._counted, parts[index + 1 :], loss_fn)
            )
            if weights is not None:
                loss = sum(
                    mean * weight
                    for mean, weight in zip(terms.means, weights, strict=True)
                    if weight
                )
                assert isinstance(loss, torch.Tensor)
                tally.add(loss.detach())
                extra.append((samples, terms.extra))
                self._backward(loss, inputs())
        return PassResult(*tally.finish(parameters)[:4], put_together(extra))

    def added(self, batches: Sequence[_Parts], loss_fn: LossFunction, inputs: Inputs) -> PassResult:
        """Run several batches, and add their losses and gradients.

        If a batch is split, each part is weighted by its share of the batch's mean.
        """
        losses = []
        samples = 0
        for parts in batches:
            weights = shares(self._safety.weighting(loss_fn), parts) if len(parts) > 1 else (1.0,)
            for (part, size), weight in zip(parts, weights or (0.0,) * len(parts), strict=True):
                terms = self._forward(part, size, loss_fn)
                samples += size
                if terms.declared:
                    raise BatchError(
                        "loss_fn declares the items of its mean, in a window with added=True",
                        limit="with added=True, the caller has already weighted the losses",
                        fix="return the bare loss, or create the window without added=True.",
                        rule="H203",
                    )
                # A part without items has weight 0.
                if weight:
                    loss = terms.total() if weight == 1.0 else terms.total() * weight
                    losses.append(loss.detach())
                    self._backward(loss, inputs())
        return PassResult(sum(losses[1:], losses[0]), samples)

    def _in_two_passes(self, loss_fn: TwoPass, batch: Any, parts: _Parts, inputs: Inputs) -> Terms:
        if batch is None:
            raise BatchError(
                "a TwoPass received a window of several batches",
                limit="it compares the samples of one batch",
                fix="collate the samples into one batch, which is split when memory runs out.",
                rule="H203",
            )
        run = TwoPassRun(
            call=lambda function, given: self._call(loss_fn, function, given),
            backward=self._backward,
            new_keeper=self._safety.loss_calls.new_keeper,
            devices=self._devices,
            inputs=inputs,
        )
        terms = run.accumulate(loss_fn, batch, parts)
        terms.check_items()
        return terms

    def _counted(self, parts: _Parts, loss_fn: LossFunction) -> list[list[float]]:
        """Return the number of items of each term in these parts, without changing any state."""
        random_state = capture(self._devices)
        buffers = self._safety.loss_calls.new_keeper()
        buffers.capture()
        read = without_graph(
            lambda: [
                self._forward(part, samples, loss_fn, needs_graph=False).read()
                for part, samples in parts
            ]
        )
        buffers.restore()
        restore(random_state)
        return [counts for means, counts in read if not _is_bad(means, counts)]

    def _forward(
        self, part: Any, samples: int | None, loss_fn: LossFunction, *, needs_graph: bool = True
    ) -> Terms:
        return read_loss(self._call(loss_fn, loss_fn, part), samples, needs_graph=needs_graph)

    def _call(self, loss_fn: LossFunction, function: Callable[[Any], Any], part: Any) -> Any:
        with self._safety.loss_calls.forbid_training_calls():
            if self._precision == "fp32":
                return self._safety.call(loss_fn, function, fresh(part))
            with autocast(self._device_type, self._precision):
                return self._safety.call(loss_fn, function, fresh(part))

    def _backward(self, loss: torch.Tensor, reached: Sequence[torch.Tensor] | None) -> None:
        # `reached` is the ``inputs`` argument for ``backward``: the parameters that may receive
        # gradients. None means that all parameters may.
        if reached is not None and not reached:
            # No parameter requires a gradient.
            return
        if self._loss_scale.enabled:
            loss = self._loss_scale.scale(loss)
        if not self._watched:
            loss.backward(inputs=reached)  # type: ignore[no-untyped-call]
            return
        with weights_stay(self._watched):
            loss.backward(inputs=reached)  # type: ignore[no-untyped-call]


class _Tally:
    """The running totals over the parts of a batch: items, loss, and dropped samples."""

    def __init__(
        self, weighting: Weighting, size: int, *, drops: bool, empty_is_tried: bool
    ) -> None:
        self._weighting = weighting
        self._empty_is_tried = empty_is_tried
        self._size = size
        self._drops = drops
        # The number of samples in the parts so far.
        self._seen = 0
        # The estimated number of items of each term in the whole batch. Empty until the first part
        # with items, which also sets the next four attributes.
        self._estimates: list[float] = []
        # The number of items of each term in the parts so far.
        self._items: list[float] = []
        # Whether the loss has several terms.
        self._several = True
        # Whether the loss is a mean rather than a sum.
        self._is_mean = True
        # Whether the loss function declares the number of items.
        self._declared = True
        # The weighted sum of the losses of the parts so far.
        self._loss: torch.Tensor | None = None
        # The loss of the last part that was dropped.
        self._bad: torch.Tensor | None = None
        # ``(start, end)`` of the samples in each part that was dropped.
        self._dropped: list[tuple[int, int]] = []

    def weigh(
        self, terms: Terms, part: Any, samples: int, count_rest: Callable[[], list[list[float]]]
    ) -> list[float] | None:
        """Return the weight of each term of a part, or None if the part must be left out."""
        start = self._seen
        self._seen += samples
        terms = self._with_items(terms, part, samples)
        means, counts = terms.read()
        must_be_tried = self._must_be_tried(means, counts)
        if not any(counts):
            if must_be_tried:
                raise EmptyPartError(start)
            # A part without items has no mean, so it is left out.
            return None
        if self._drops and _is_bad(means, counts):
            self._dropped.append((start, self._seen))
            self._bad = terms.total().detach()
            return None
        if not self._estimates:
            self._estimate(terms, counts, samples, count_rest)
        self._check_number_of_terms(counts)
        if must_be_tried:
            raise EmptyPartError(start)
        self._items = [total + count for total, count in zip(self._items, counts, strict=True)]
        return self._weights_of(counts)

    def _with_items(self, terms: Terms, part: Any, samples: int) -> Terms:
        """Return terms with their numbers of items, which are counted if none are declared."""
        if terms.declared:
            return terms
        items = (self._weighting.count(part, samples),)
        return Terms(means=terms.means, items=items, declared=False)

    def _must_be_tried(self, means: Sequence[float], counts: Sequence[float]) -> bool:
        """Return whether a trial must first show that terms without items may be left out.

        A term without items should have a mean of 0 or NaN.
        """
        if self._empty_is_tried:
            return False
        empty = [mean for mean, count in zip(means, counts, strict=True) if not count]
        return any(mean and math.isfinite(mean) for mean in empty)

    def _check_number_of_terms(self, counts: Sequence[float]) -> None:
        """Raise H203 if a part has another number of terms than the parts before it."""
        if len(counts) != len(self._estimates):
            raise _uneven(
                f"{len(self._estimates)} terms for one part of the batch and {len(counts)} for"
                " another"
            )

    def _weights_of(self, counts: Sequence[float]) -> list[float]:
        """Return the weight of each term of a part: its share of the estimated items."""
        return [
            count / estimate if count else 0.0
            for count, estimate in zip(counts, self._estimates, strict=True)
        ]

    def _estimate(
        self,
        terms: Terms,
        counts: list[float],
        samples: int,
        count_rest: Callable[[], list[list[float]]],
    ) -> None:
        """Estimate the number of items in the whole batch from the first part with items."""
        self._items = [0.0] * len(counts)
        self._declared = terms.declared
        self._several = len(counts) > 1
        self._is_mean = terms.declared or self._weighting.kind != "sum"
        if self._several:
            self._estimates = [sum(column) for column in zip(counts, *count_rest(), strict=True)]
            if 0 in self._estimates:
                raise bad_items(0)
        else:
            # Assume that all samples have as many items as those of this part. A loss that is a
            # sum needs no weight.
            self._estimates = [counts[0] * self._size / samples if self._is_mean else 1.0]

    def add(self, loss: torch.Tensor) -> None:
        """Add the weighted loss of a part."""
        self._loss = loss if self._loss is None else self._loss + loss

    def finish(self, parameters: Sequence[torch.Tensor]) -> PassResult:
        """Rescale the gradients to the actual number of items, and return the result."""
        if self._loss is None:
            return self._finish_without_parts(parameters)
        if self._several and self._items != self._estimates:
            raise _uneven(
                f"items of {self._estimates} in one forward pass and of {self._items} in the next"
            )
        factor = self._estimates[0] / self._items[0] if self._is_mean else 1.0
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
        items = self._items[0]
        if not self._declared:
            items = self._size - sum(end - start for start, end in self._dropped)
        return PassResult(self._loss * factor, items, tuple(self._dropped))

    def _finish_without_parts(self, parameters: Sequence[torch.Tensor]) -> PassResult:
        """Return the result if all parts were left out.

        Raises:
            BatchError: H203 if no part has items.
        """
        if self._bad is None:
            raise bad_items(0)
        # All parts were dropped. Set the gradients to NaN, as backward through such a loss would
        # do.
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, math.nan)
        return PassResult(self._bad, self._size)


def _is_bad(means: Sequence[float], counts: Sequence[float]) -> bool:
    # The mean of a term without items does not matter.
    return not all(math.isfinite(mean) for mean, count in zip(means, counts, strict=True) if count)


def _uneven(what: str) -> BatchError:
    return BatchError(
        f"loss_fn returned {what}",
        limit=(
            "a loss must have the same terms for each part, and each pass over a part must count"
            " the same items"
        ),
        fix=(
            "always return the same terms, with items=0 where there are none, and count items from"
            " the batch."
        ),
        rule="H203",
    )
