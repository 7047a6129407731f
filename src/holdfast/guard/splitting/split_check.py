"""Run trial splits to find out whether splitting keeps the gradient, and with which weights.

A trial splits 4 samples into 3 + 1 and compares the gradient of all 4 with the weighted sum of the
gradients of the two parts. If the loss function does not declare what its mean is taken over, all
candidates in the batch are tried. If none of them reproduces the gradient, the loss couples the
samples (in-batch negatives, a pairwise loss).

Models are in training mode, except for layers such as BatchNorm, which `SplitSafety` handles. The
parts receive the same random numbers for their samples as the whole batch. If that is impossible, a
loss with declared items is compared in evaluation mode, and any other loss is not compared.

On the CPU, trials run in a forked copy of the process, so they have no effect on training. A
process that uses an accelerator cannot be forked. In this case, the trial runs in the training
process, right before a split, and the caller restores all state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _pytree as pytree

from holdfast.core.forked import NoAnswer, run_in_forked_copy
from holdfast.guard.splitting.draws import Draws, NotRepeatableError
from holdfast.guard.splitting.loss_functions import CalledInsideError, find_side_effects
from holdfast.guard.splitting.selection import MASK, Selection, SelectionFinder
from holdfast.guard.splitting.split_result import CheckOutcome, Draw, SplitCheckResult, combine
from holdfast.guard.splitting.two_pass import TwoPass, TwoPassRun
from holdfast.guard.splitting.weighting import (
    SAMPLES,
    Weighting,
    disagreement,
    find_weightings,
    shares,
    with_an_empty_one,
)
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.states import StateKeeper
from holdfast.guard.state.trees import same
from holdfast.loader.random_state import seed_cpu
from holdfast.loader.splitting import (
    Split,
    batch_size,
    copied,
    micro_batches,
    select,
    tensors_in,
)
from holdfast.memory import onednn
from holdfast.memory.oom import clear_exception_frames, find_out_of_memory
from holdfast.memory.tensors import versions_of
from holdfast.numerics.eager import eager
from holdfast.numerics.loss import Terms, read_loss, without_graph

# The number of samples in a trial.
_SAMPLES = 4
# The largest relative difference between gradients that counts as rounding. In fp32, the rounding
# difference between 3 + 1 samples and 4 samples stays below 1e-5, while coupled losses differ by
# 0.01 or more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 5e-2
# If a loss is a mean plus a small sum, splitting changes the gradient of a few samples by less than
# the tolerance, but the error grows with the batch. On the CPU in fp32, the gradients or the losses
# must therefore differ by less than these limits. Rounding never exceeds both of them.
_FP32_GRADIENT_LIMIT = 2e-5
_FP32_LOSS_LIMIT = 3e-6
# On accelerators and in half precision, losses must agree within this share of the tolerance. The
# terms of a loss do not cancel out, so rounding affects losses less than gradients.
_LOSS_SHARE_OF_TOLERANCE = 0.1
# If two weightings differ by less than this, they are not worth distinguishing: they change
# gradients by less than a coupled loss does.
MIN_DISAGREEMENT = 0.01
# The maximum number of sets of four samples to compare.
_MAX_SUBSETS = 4
# The number of comparisons, each with different random numbers, if samples share random numbers.
_NUM_SEEDS = 3
# The maximum number of comparisons that include a sample without items, and the maximum number of
# samples to search for one.
_MAX_EMPTY = 2
_MAX_SAMPLES_TO_SEARCH = 256
# The maximum number of sets of four samples to search for one that distinguishes weightings.
# Cutting and counting one set takes 0.1 ms.
_MAX_SUBSETS_TO_SEARCH = 64
_NOT_REPEATABLE = (
    "when called again, the loss has a different gradient: it carries state, or its random numbers"
    " cannot be repeated for parts of the batch (a permutation, a numpy generator), so no trial can"
    " show whether the parts add up to the whole"
)
# The share of a micro-batch's samples that are in the first part. The micro-batch is compared with
# its parts twice, once for each of these shares.
_HALF = 0.5
_THREE_QUARTERS = 0.75
_Parts: TypeAlias = Sequence[tuple[Any, int]]
# What is compared: gradients, or only losses if memory is too short for gradients.
_Quantity: TypeAlias = Literal["gradients", "losses"]


class _SplitDifference(NamedTuple):
    """The relative differences between the whole set of samples and its parts."""

    # The L2 norm of the gradients' difference, relative to the whole gradient.
    of_gradients: float
    # The difference of the losses, relative to the whole loss.
    of_losses: float


class _Judgment(NamedTuple):
    """What a comparison shows; see the fields of `SplitCheckResult`."""

    outcome: CheckOutcome
    draws: Draw
    why: str = ""


@dataclass(slots=True, kw_only=True)
class SplitCheck:
    """Checks whether splitting keeps the gradient of one loss function."""

    # The loss function. It receives copies of the batch.
    loss_fn: Callable[[Any], Any]
    # Which dimension of the batch's tensors is the batch dimension.
    split: Split
    # Keeps copies of the states, which are restored before each evaluation and compared after it.
    states: StateKeeper
    models: Mapping[str, nn.Module]
    # The parameters whose gradients are compared. The check overwrites their ``.grad`` and then
    # clears it.
    parameters: Sequence[torch.Tensor]
    # Function that returns a context in which to call a loss function.
    calling: Callable[[], contextlib.AbstractContextManager[Any]]
    # Whether that context computes in half precision.
    rounds_to_half: bool
    # Whether this process is a copy that will be discarded, so that side effects are harmless.
    in_a_copy: bool
    # The weightings that held in earlier batches.
    earlier_weightings: Sequence[Weighting] = ()
    # Whether splitting kept the gradients of earlier batches.
    has_passed: bool = False
    _draws: Draws | None = field(default=None, init=False)
    _seed: int = field(default=0, init=False)
    _buffers: BufferKeeper | None = field(default=None, init=False)
    # Whether the loss function declares items, and whether it changes its batch.
    _loss_facts: tuple[bool, bool] = field(default=(False, False), init=False)
    # The share of the samples in the first part. None means all samples but one.
    _first_share: float | None = field(default=None, init=False)
    # The names of states whose final values differ between a pass over the whole batch and passes
    # over its parts.
    uneven: list[str] = field(default_factory=list)

    def run(self, batch: Any, size: int, empty: int | None = None) -> SplitCheckResult:
        """Run the check on several sets of four samples from a batch.

        The sets are: the first samples, samples that are spread over the batch, and sets that
        distinguish candidates for the weighting.

        Args:
            batch: The batch.
            size: The number of samples in the batch.
            empty: The position of a sample for which the loss function declares no items. None if
                there is no such sample.

        Returns:
            The combined result of all comparisons.
        """
        self.states.keep()
        windows = [
            window
            for window, num_samples in micro_batches(batch, size, min(_SAMPLES, size), self.split)
            if num_samples > 1
        ]
        if not callable(self.split) and size > _SAMPLES:
            # Samples that are far apart in the batch are more likely to differ.
            windows[1:] = [
                *windows[1:-1],
                select(batch, size, [0, 1, size // 2, size - 1], self.split),
            ]
        changed_buffer = self._find_changed_buffer(windows[0])
        side_effects = self._side_effects(windows[0]) if self.in_a_copy else ()
        weightings = list(dict.fromkeys([*find_weightings(batch, size), *self.earlier_weightings]))
        with self._evaluating():
            results = self._check_sets(windows, weightings)
            if not callable(self.split):
                results += self._check_empty_parts(batch, size, weightings, empty)
                results += self._check_one_label(windows[0], batch, weightings)
            selects = self._find_selection(windows[0])
        changed_buffer = changed_buffer or next(iter(self.uneven), "")
        return replace(
            combine(results),
            changed_buffer=changed_buffer,
            side_effects=side_effects,
            selects=selects,
        )

    def compare_halves(self, part: Any, size: int) -> SplitCheckResult:
        """Compare the gradient of a micro-batch with that of its two halves.

        A loss may start to couple or to select samples long after the first steps. A whole
        micro-batch reveals this more often than four samples. Comparing halves alone is not enough:
        the mean of the two largest of eight losses is the same if each half contains one of them.
        Therefore, the micro-batch is also split into three quarters and one quarter.

        Args:
            part: A micro-batch of a size that is known to fit in memory.
            size: The number of samples in the micro-batch.
        """
        self.states.keep()
        weightings = list(dict.fromkeys([*find_weightings(part, size), *self.earlier_weightings]))
        results: list[SplitCheckResult] = []
        with self._evaluating():
            for share in (_HALF, _THREE_QUARTERS) if size >= _SAMPLES else (_HALF,):
                self._first_share = share
                result = self._compare_if_it_fits(part, weightings)
                results.append(replace(result, why=result.why or _describe_halves(result, size)))
                if result.outcome == "coupled":
                    break
            selects = self._find_selection(part)
        changed_buffer = next(iter(self.uneven), "")
        return replace(combine(results), changed_buffer=changed_buffer, selects=selects)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Return a context for evaluations, in training mode except for layers that mix samples.

        Buffers and states are restored on exit.
        """
        self._buffers = BufferKeeper(dict(self.models))
        self._buffers.keep()
        # Fused attention kernels draw dropout in a way that cannot be recorded.
        plain = sdpa_kernel(SDPBackend.MATH) if self._devices() else contextlib.nullcontext()
        with _modes(self.models.values(), mixing_layers), plain, torch.enable_grad():
            yield
        self._restore_start(0)

    def detect_side_effects(
        self, batch: Any, size: int | None, *, include_logs: bool = False
    ) -> SplitCheckResult:
        """Find the side effects of a forward pass, without comparing gradients.

        Args:
            batch: The batch.
            size: The number of samples in the batch, of which four are used. With None, the whole
                batch is used.
            include_logs: Whether to include changes that do not affect the next loss, such as
                changes of a log, or of a counter that may have an effect later.
        """
        self.states.keep()
        window = (
            batch
            if size is None
            else micro_batches(batch, size, min(_SAMPLES, size), self.split)[0][0]
        )
        return SplitCheckResult(
            outcome="trusted", side_effects=self._side_effects(window, include_logs=include_logs)
        )

    def _side_effects(self, window: Any, *, include_logs: bool = False) -> tuple[str, ...]:
        buffers = BufferKeeper(dict(self.models), self.states)
        buffers.keep()

        # Undo each forward pass, so that the next one starts from the same state.
        def forward() -> float:
            loss = self._forward_once(window)
            buffers.put_back()
            return loss

        return find_side_effects(
            self.models,
            self.loss_fn,
            forward,
            restored=self.states.objects(),
            include_logs=include_logs,
        )

    def _check_sets(
        self, windows: Sequence[Any], weightings: Sequence[Weighting]
    ) -> list[SplitCheckResult]:
        """Compare the first and last set of samples, and then sets that distinguish weightings.

        As long as several weightings have held for all sets so far, the next set to compare is the
        one in which these weightings differ most.

        Args:
            windows: The sets of samples.
            weightings: The candidates for the weighting.
        """
        # If there is only one set, it is both the first and the last one.
        next_windows = [windows[0], *windows[1:][-1:]]
        others = list(windows[1:-1][:_MAX_SUBSETS_TO_SEARCH])
        results: list[SplitCheckResult] = []
        while next_windows:
            result = self._compare_if_it_fits(next_windows.pop(0), weightings)
            results.append(result)
            is_decided = result.declared or result.outcome != "exact"
            if next_windows or is_decided or len(results) >= _MAX_SUBSETS:
                continue
            failed = {weighting for earlier in results for weighting in earlier.failed}
            remaining = [weighting for weighting in weightings if weighting not in failed]
            if len(remaining) < 2 or not others:
                continue
            differences = [disagreement(remaining, self._cut(window)) for window in others]
            largest = max(differences)
            if largest > MIN_DISAGREEMENT:
                next_windows.append(others.pop(differences.index(largest)))
        return results

    def _check_empty_parts(
        self, batch: Any, size: int, weightings: Sequence[Weighting], empty: int | None
    ) -> list[SplitCheckResult]:
        """Run the check on sets of samples whose last sample has no items.

        When such a set is cut, its second part is this sample, which has weight 0. The check shows
        whether the part still has a loss, which would be lost if the part were left out.

        Args:
            batch: The batch.
            size: The number of samples in the batch.
            weightings: The candidates for the weighting. For each of them, one set ends with a
                sample whose weight is 0, if the batch contains one.
            empty: The position of a sample for which the loss function declares no items. If it
                is not None, the first set ends with this sample.
        """
        single_samples = micro_batches(batch, size, 1, self.split)[:_MAX_SAMPLES_TO_SEARCH]
        sets = [
            tuple(with_an_empty_one(weighting, single_samples, _SAMPLES))
            for weighting in weightings
        ]
        if empty is not None:
            others = [position for position in range(size) if position != empty]
            sets.insert(0, (*others[: _SAMPLES - 1], empty))
        # A set is empty if no sample has weight 0. Several weightings may give the same set.
        distinct_sets = list(dict.fromkeys(filter(None, sets)))
        return [
            self._compare_if_it_fits(select(batch, size, positions, self.split), weightings)
            for positions in distinct_sets[:_MAX_EMPTY]
        ]

    def _check_one_label(
        self, window: Any, batch: Any, weightings: Sequence[Weighting]
    ) -> list[SplitCheckResult]:
        """Run the check on samples as if all of them had the label that is rarest in the batch.

        A loss that compares labels couples samples with the same label, and four samples rarely
        share a label. Without this check, the coupling might not be noticed.
        """
        uneven_before = len(self.uneven)
        result = None
        self._restore_start(0)
        states = self.states.now()
        # This may fail, because the integers may be lengths or row numbers rather than labels.
        with contextlib.suppress(Exception):
            relabeled = _with_one_label(window, batch, batch_size(batch, self.split))
            if relabeled is not None:
                result = self._compare(relabeled, weightings, "gradients")
        # The integers may be row numbers of a state that the loss function writes to.
        are_rows = not same(states, self.states.now())
        del self.uneven[uneven_before:]
        self._clear()
        if are_rows or result is None or result.why:
            return []
        why = ""
        if result.outcome == "coupled":
            why = (
                "the gradient over 4 samples of one label differs by"
                f" {result.difference:.1%} from the gradient over 3 + 1 of them"
            )
        return [replace(result, why=why)]

    def _cut(self, window: Any) -> _Parts:
        # Cut a set of samples into two parts, with `first` samples in the first part.
        num_samples = batch_size(window, self.split)
        first = num_samples - 1
        if self._first_share is not None:
            first = min(first, math.ceil(self._first_share * num_samples))
        return micro_batches(window, num_samples, first, self.split)

    def _compare_if_it_fits(self, window: Any, weightings: Sequence[Weighting]) -> SplitCheckResult:
        """Compare the gradients of 4 samples. If memory is short, use 2, or only their losses."""
        pair = micro_batches(window, batch_size(window, self.split), 2, self.split)[0][0]
        tries: list[tuple[Any, _Quantity]] = [
            (window, "gradients"),
            (pair, "gradients"),
            (pair, "losses"),
        ]
        for number, (samples, quantity) in enumerate(tries, start=1):
            try:
                return self._compare(samples, weightings, quantity)
            except Exception as error:
                if find_out_of_memory(error) is None or number == len(tries):
                    raise
                failure = error
            finally:
                self._clear()
            clear_exception_frames(failure)
        raise AssertionError

    def _compare(
        self, window: Any, weightings: Sequence[Weighting], quantity: _Quantity
    ) -> SplitCheckResult:
        """Compare some samples with their two parts, for each weighting.

        If the random numbers cannot be repeated, this falls back to evaluation mode.
        """
        result = self._compare_in_this_mode(window, weightings, quantity)
        if result.draws != "unknown" or not result.declared:
            return result
        # The loss may draw random numbers only in training mode.
        with _modes(self.models.values(), nn.Module.modules):
            result = self._compare_in_this_mode(window, weightings, quantity)
        if result.outcome in ("exact", "random"):
            return replace(
                result,
                outcome="random",
                draws="own" if isinstance(self.loss_fn, TwoPass) else "unknown",
            )
        return result

    def _compare_in_this_mode(
        self, window: Any, weightings: Sequence[Weighting], quantity: _Quantity
    ) -> SplitCheckResult:
        """Compare some samples with their two parts, in the current mode of the models."""
        if isinstance(self.loss_fn, TwoPass):
            return self._compare_with(None, window, weightings, quantity)
        result = self._compare_with_same_draws(window, weightings, quantity)
        for _ in range(1, _NUM_SEEDS):
            # Shared random numbers may decide whether samples are mixed, so repeat the comparison
            # with other numbers.
            if result.outcome == "random" and result.draws == "shared":
                self._seed += 1
                other_result = self._compare_with_same_draws(window, weightings, quantity)
                result = combine([result, other_result])
        return result

    def _compare_with_same_draws(
        self,
        window: Any,
        weightings: Sequence[Weighting],
        quantity: _Quantity,
        *,
        in_order: bool = False,
    ) -> SplitCheckResult:
        """Compare some samples with two parts that get the same random numbers as the whole set.

        Args:
            window: The samples.
            weightings: The candidates for the weighting, unless items are declared.
            quantity: Whether to compare gradients or losses.
            in_order: How random numbers from outside of torch are repeated; see `Draws`. If False
                does not give a result, the comparison is repeated with True.
        """
        draws = Draws(self._devices(), self._least_tolerance(), self._seed, in_order=in_order)
        try:
            result = self._compare_with(draws, window, weightings, quantity)
        except NotRepeatableError:
            # If the loss function draws numbers for one sample after another, the parts draw the
            # same numbers as the whole set without help.
            result = self._compare_with(None, window, weightings, quantity)
            if result.outcome == "exact":
                return replace(result, outcome="random", draws="own")
            return result
        if result.draws == "unknown" and draws.outside_torch and not in_order:
            return self._compare_with_same_draws(window, weightings, quantity, in_order=True)
        return result

    def _compare_with(
        self,
        draws: Draws | None,
        window: Any,
        weightings: Sequence[Weighting],
        quantity: _Quantity,
    ) -> SplitCheckResult:
        """Compare some samples with their two parts, for each weighting.

        Args:
            draws: The object that repeats random numbers in the parts. None repeats no numbers.
            window: The samples.
            weightings: The candidates for the weighting, unless items are declared.
            quantity: Whether to compare gradients or losses.
        """
        self._draws = draws
        whole = [(window, batch_size(window, self.split))]
        parts = self._cut(window)
        by_samples = self._difference(quantity, whole, parts, SAMPLES)
        # The comparison has called the loss function, so these facts are known now.
        declared, changes_batch = self._loss_facts
        if math.isnan(by_samples.of_gradients):
            return SplitCheckResult(
                outcome="unknown",
                declared=declared,
                changes_batch=changes_batch,
                why="the gradient of the samples is zero or not finite",
            )
        differences: dict[Weighting, _SplitDifference] = {}
        if not declared:
            differences = self._differences_by_weighting(
                quantity, whole, parts, weightings, by_samples
            )
        held = {
            weighting: difference
            for weighting, difference in differences.items()
            if self._fits(difference)
        }
        is_reproduced = self._fits(by_samples) if declared else bool(held)
        judgement = self._judge(
            draws, whole, quantity, is_reproduced=is_reproduced, declared=declared
        )
        return SplitCheckResult(
            outcome=judgement.outcome,
            draws=judgement.draws,
            why=judgement.why,
            difference=next(iter(held.values()), by_samples).of_gradients,
            declared=declared,
            changes_batch=changes_batch,
            held=tuple(held),
            failed=tuple(weighting for weighting in differences if weighting not in held),
        )

    def _differences_by_weighting(
        self,
        quantity: _Quantity,
        whole: _Parts,
        parts: _Parts,
        weightings: Sequence[Weighting],
        by_samples: _SplitDifference,
    ) -> dict[Weighting, _SplitDifference]:
        """Return the difference between the whole set and its parts under each weighting.

        Weightings under which all samples have weight 0 cannot be tried, so they are left out.

        Args:
            quantity: Whether to compare gradients or losses.
            whole: The whole set of samples.
            parts: The parts of the set.
            weightings: The candidates for the weighting.
            by_samples: The difference under the weighting `SAMPLES`.
        """
        # Weightings that give the parts the same weights are compared only once.
        by_weights = {shares(SAMPLES, parts): by_samples}
        differences = {}
        for weighting in weightings:
            weights = shares(weighting, parts)
            if weights is None:
                continue
            if weights not in by_weights:
                by_weights[weights] = self._difference(quantity, whole, parts, weighting)
            differences[weighting] = by_weights[weights]
        return differences

    def _judge(
        self,
        draws: Draws | None,
        whole: _Parts,
        quantity: _Quantity,
        *,
        is_reproduced: bool,
        declared: bool,
    ) -> _Judgment:
        """Return what a comparison shows about splitting.

        Args:
            draws: The object that has repeated random numbers in the parts, if any.
            whole: The whole set of samples.
            quantity: Whether gradients or losses were compared.
            is_reproduced: Whether the parts have reproduced the gradient of the whole set.
            declared: Whether the loss function declares items.
        """
        drawn = _kind_of_draws(draws)
        if is_reproduced:
            return _Judgment("exact" if drawn == "none" else "random", drawn)
        if not self._is_unrepeatable(draws, whole, quantity):
            return _Judgment("coupled", drawn)
        # The random numbers differ between the whole set and its parts, so the difference proves
        # nothing.
        if declared:
            return _Judgment("random", "unknown")
        return _Judgment("coupled", "unknown", _NOT_REPEATABLE)

    def _fits(self, difference: _SplitDifference) -> bool:
        """Return whether a difference is small enough to be due to rounding. NaN is not."""
        is_within_tolerance = difference.of_gradients <= self._least_tolerance()
        if not is_within_tolerance:
            return False
        if self._devices() or self._least_tolerance() == _HALF_TOLERANCE:
            # TF32 and half precision round by more than the limits below.
            return True
        return (
            difference.of_gradients <= _FP32_GRADIENT_LIMIT
            or difference.of_losses <= _FP32_LOSS_LIMIT
        )

    def _is_unrepeatable(self, draws: Draws | None, whole: _Parts, quantity: _Quantity) -> bool:
        """Return whether the whole set gives a different result when it is evaluated again.

        If it does, a difference between the whole set and its parts proves nothing.
        """
        if draws is not None and draws.outside_torch:
            return True
        if isinstance(self.loss_fn, TwoPass) and not self._fits(
            self._difference(quantity, whole, whole, SAMPLES)
        ):
            raise RuntimeError(
                "the outputs of a TwoPass draw from a generator of their own, which the two passes"
                " share"
            )
        return not self._fits(self._difference(quantity, whole, whole, SAMPLES, seed=1))

    def _difference(
        self,
        quantity: _Quantity,
        whole: _Parts,
        parts: _Parts,
        weighting: Weighting,
        seed: int = 0,
    ) -> _SplitDifference:
        """Return how much a set of samples and its parts differ.

        Args:
            quantity: Whether to compare gradients or losses.
            whole: The whole set of samples.
            parts: The parts of the set, or the whole set again.
            weighting: How to weight the parts, unless items are declared.
            seed: Selects the random numbers for the parts. With 0, they are those of the whole set.
        """
        if quantity == "losses":
            return self._difference_of_losses(whole, parts, weighting, seed)
        return self._difference_of_gradients(whole, parts, weighting, seed)

    def _difference_of_gradients(
        self, whole: _Parts, parts: _Parts, weighting: Weighting, seed: int
    ) -> _SplitDifference:
        """Return the differences in gradient and loss between a set of samples and its parts.

        If the gradient of the whole set is zero or not finite, the relative difference is NaN.
        """
        self._clear()
        self._restore_start(0, whole)
        expected_loss = self._accumulate(whole, whole, SAMPLES)
        norm = self._norm()
        states_after_whole = self.states.now()
        if not math.isfinite(norm) or norm == 0:
            return _SplitDifference(math.nan, 0.0)
        # The gradients of the parts are added to the negated gradient of the whole set, which
        # leaves the difference.
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = -parameter.grad
        self._restore_start(seed)
        loss = self._accumulate(parts, whole, weighting)
        states_after_parts = self.states.now()
        tolerance = self._least_tolerance()
        self.uneven.extend(
            name
            for name, state in states_after_whole.items()
            if not same(state, states_after_parts[name], tolerance=tolerance)
        )
        of_losses = abs(loss - expected_loss) / (abs(expected_loss) or 1.0)
        if self.has_passed and self._is_rounding(expected_loss, loss):
            return _SplitDifference(0.0, of_losses)
        return _SplitDifference(_nan_to_inf(self._norm() / norm), of_losses)

    def _is_rounding(self, expected: float, loss: float) -> bool:
        """Return whether two losses are equal up to rounding.

        If they are, the caller does not compare their gradients.

        Near a minimum, the gradients of samples cancel out, and only rounding errors remain. A loss
        near zero consists mostly of the rounding errors of its logits. Neither shows that samples
        are coupled.
        """
        is_exact = not self._devices() and self._least_tolerance() != _HALF_TOLERANCE
        allowed = (
            _FP32_LOSS_LIMIT if is_exact else self._least_tolerance() * _LOSS_SHARE_OF_TOLERANCE
        )
        return abs(loss - expected) <= allowed * max(1.0, abs(expected))

    def _difference_of_losses(
        self, whole: _Parts, parts: _Parts, weighting: Weighting, seed: int
    ) -> _SplitDifference:
        """Compare only losses, which reveals coupled samples in nearly all cases as well."""
        if isinstance(self.loss_fn, TwoPass):
            # A `TwoPass` computes its loss from all samples at once, regardless of the parts.
            return _SplitDifference(0.0, 0.0)

        def value(parts: _Parts, weighting: Weighting) -> float:
            return math.fsum(
                float(loss.detach()) for loss in self._losses(parts, weighting, needs_graph=False)
            )

        self._restore_start(0, whole)
        expected = without_graph(lambda: value(whole, SAMPLES))
        self._restore_start(seed)
        loss = without_graph(lambda: value(parts, weighting))
        if not math.isfinite(expected):
            return _SplitDifference(math.nan, 0.0)
        return _SplitDifference(_nan_to_inf(abs(loss - expected) / (abs(expected) or 1.0)), 0.0)

    def _accumulate(self, parts: _Parts, whole: _Parts, weighting: Weighting) -> float:
        """Add the gradient of the parts' weighted loss to ``.grad``, and return this loss."""
        if isinstance(self.loss_fn, TwoPass) and parts is not whole:
            run = TwoPassRun(
                call=self._call,
                backward=lambda loss, inputs: loss.backward(inputs=inputs),  # type: ignore[no-untyped-call]
                new_snapshot=lambda: BufferKeeper(dict(self.models)),
                devices=self._devices(),
                inputs=self._trainable,
            )
            return float(run.accumulate(self.loss_fn, whole[0][0], parts).total().detach())
        losses = self._losses(parts, weighting)
        for loss in losses:
            # The loss of a part without items has no gradient.
            if loss.requires_grad:
                with contextlib.nullcontext() if self._draws is None else self._draws.backward():
                    loss.backward(inputs=self._trainable())  # type: ignore[no-untyped-call]
        return math.fsum(float(loss.detach()) for loss in losses)

    def _trainable(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def _losses(
        self, parts: _Parts, weighting: Weighting, *, needs_graph: bool = True
    ) -> list[torch.Tensor]:
        """Return the loss of each part, weighted by its declared items or by `weighting`."""
        results = []
        first = 0
        for part, samples in parts:
            context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self._draws is not None:
                context = self._draws.call(first, samples)
            with context:
                results.append(self._terms(part, samples, needs_graph=needs_graph))
            first += samples
        if len(parts) == 1:
            ((whole_terms, changes_batch),) = results
            self._loss_facts = (
                whole_terms.declared or isinstance(self.loss_fn, TwoPass),
                changes_batch,
            )
        terms_of_parts = [terms for terms, _ in results]
        losses = []
        weights_of_parts = _weights_of_terms(terms_of_parts, parts, weighting)
        for terms, weights in zip(terms_of_parts, weights_of_parts, strict=True):
            # A term with weight 0 is left out, since its mean may be NaN.
            weighted = [
                mean * weight for mean, weight in zip(terms.means, weights, strict=True) if weight
            ]
            losses.append(sum(weighted, torch.zeros_like(terms.means[0])))
        return losses

    def _terms(self, part: Any, samples: int, *, needs_graph: bool = True) -> tuple[Terms, bool]:
        """Call the loss function with a copy of a part.

        Returns:
            The terms of the loss, and whether the loss function has changed the copy.
        """
        copy = copied(part)
        tensors = tensors_in(copy)
        versions = versions_of(tensors)
        with self.calling():
            terms = read_loss(self.loss_fn(copy), samples, needs_graph=needs_graph)
        return terms, versions_of(tensors) != versions

    def _call(self, function: Callable[[Any], Any], part: Any) -> Any:
        with self.calling():
            return function(copied(part))

    def _find_selection(self, window: Any) -> str:
        """Return the name of the function with which the loss selects samples, or an empty string.

        A function selects samples if the dimension from which it selects grows with their number.
        """
        in_whole = self._selections(window)
        in_part = self._selections(self._cut(window)[0][0])
        if in_whole is None or in_part is None:
            return ""
        if len(in_whole) == len(in_part):
            for first, second in zip(in_whole, in_part, strict=True):
                if first.size != second.size:
                    return first.function
            return ""
        # The number of selections differs. If both runs made selections, each sample probably made
        # its own, which is harmless. If only one run did, samples may be selected.
        if in_whole and in_part:
            return ""
        return (in_whole or in_part)[0].function

    def _selections(self, window: Any) -> list[Selection] | None:
        """Return the selections that reach the loss of some samples, or None if this is unknown."""
        finder = SelectionFinder(self.models.values())
        # The trials have shown that the loss can be called, so only the tracing can fail.
        terms = None
        with contextlib.suppress(Exception), finder:
            terms = self._terms_once(window)
        if terms is None:
            return None
        # With declared items, each part is weighted by the items that its threshold selects, which
        # is exact.
        return [
            selection
            for selection in finder.reaching(terms.means)
            if not (terms.declared and selection.function == MASK)
        ]

    def _forward_once(self, window: Any) -> float:
        """Run the loss function in training mode and return the loss, or NaN if out of memory."""
        terms = self._terms_once(window)
        return math.nan if terms is None else float(terms.total().detach())

    def _terms_once(self, window: Any) -> Terms | None:
        """Run the loss function once and return its terms, or None if it runs out of memory."""
        self._restore_start(0)
        try:
            # In a forked copy, the loss function runs with gradients, as in training, since some
            # loss functions change state only then.
            if self.in_a_copy:
                with torch.enable_grad():
                    loss = self._call(self.loss_fn, window)
            else:
                loss = without_graph(lambda: self._call(self.loss_fn, window))
            return read_loss(loss, None, needs_graph=False)
        except Exception as error:
            if find_out_of_memory(error) is None:
                raise
            return None

    def _find_changed_buffer(self, window: Any) -> str:
        """Return the name of a buffer that a forward pass changes, or an empty string.

        Running statistics do not count.
        """
        if not any(True for model in self.models.values() for _ in model.buffers()):
            return ""
        buffers = BufferKeeper(dict(self.models))
        buffers.keep()
        self._forward_once(window)
        buffers.learn()
        return next(iter(buffers.mutable_outside_norms()), "")

    def _least_tolerance(self) -> float:
        if self.rounds_to_half:
            return _HALF_TOLERANCE
        return min(
            _TOLERANCE.get(parameter.dtype, _HALF_TOLERANCE) for parameter in self.parameters
        )

    def _norm(self) -> float:
        """Return the L2 norm of all gradients together, computed in at least fp32."""
        gradients = [p.grad.to_dense() for p in self.parameters if p.grad is not None]
        wide = [
            gradient if gradient.dtype in _TOLERANCE else gradient.float() for gradient in gradients
        ]
        norms = [torch.linalg.vector_norm(gradient).double().cpu() for gradient in wide]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def _restore_start(self, seed: int, whole: _Parts | None = None) -> None:
        """Restore the state from which every evaluation starts.

        Args:
            seed: Selects the random numbers.
            whole: The whole set of samples, whose draws are then recorded. None for parts.
        """
        self.states.put_back()
        if self._buffers is not None:
            self._buffers.put_back()
        seed_cpu(self._seed + seed)
        if whole is not None and self._draws is not None:
            self._draws.start(sum(samples for _, samples in whole))

    def _devices(self) -> list[torch.device]:
        return sorted({p.device for p in self.parameters if p.device.type != "cpu"}, key=str)

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _with_one_label(window: Any, batch: Any, size: int) -> Any | None:
    """Return samples in which each label is the one that is rarest in the batch.

    Args:
        window: Some samples of the batch.
        batch: The whole batch.
        size: The number of samples in the batch.

    Returns:
        The samples, or None if the batch has no labels, that is, no integer for each sample.
    """
    if not any(_are_labels(leaf, size) for leaf in pytree.tree_leaves(batch)):
        return None

    def relabeled(leaf: Any, whole: Any) -> Any:
        if not _are_labels(whole, size):
            return leaf
        values, counts = torch.unique(whole, return_counts=True)
        return torch.full_like(leaf, values[counts.argmin()])

    return pytree.tree_map(relabeled, window, batch)


def _are_labels(leaf: Any, size: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.shape == (size,) and not leaf.is_floating_point()


def _describe_halves(result: SplitCheckResult, size: int) -> str:
    """Return a message about how a micro-batch differs from its parts, or an empty string."""
    if result.outcome != "coupled":
        return ""
    difference = "is finite, but the gradient over its parts is not"
    if math.isfinite(result.difference):
        difference = f"differs by {result.difference:.2%} from the gradient over its two parts"
    return f"the gradient over a micro-batch of {size} samples {difference}"


def _weights_of_terms(
    terms_of_parts: Sequence[Terms], parts: _Parts, weighting: Weighting
) -> list[list[float]]:
    """Return the weights of the loss terms for each part.

    If the loss declares items, the weight of a term is the part's share of the term's items.
    Otherwise, there is only one term, and `weighting` determines its weight.
    """
    if not terms_of_parts[0].declared:
        return [[weight] for weight in shares(weighting, parts) or (0.0,) * len(parts)]
    counts = [terms.read()[1] for terms in terms_of_parts]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    return [
        [count / (total or 1.0) for count, total in zip(row, totals, strict=True)] for row in counts
    ]


def _kind_of_draws(draws: Draws | None) -> Draw:
    """Return the kind of random numbers that the loss has drawn."""
    if draws is None or not draws.drew:
        return "none"
    return "shared" if draws.shared else "own"


def _nan_to_inf(difference: float) -> float:
    # The gradient of the whole set is finite, so a NaN comes from the parts. It must count as a
    # difference, while NaN stands for a comparison that was not possible.
    return difference if math.isfinite(difference) else math.inf


@contextlib.contextmanager
def _modes(
    models: Iterable[nn.Module], of: Callable[[nn.Module], Iterable[nn.Module]]
) -> Iterator[None]:
    """Return a context with some modules in evaluation mode, and no dropout in recurrent layers.

    The random numbers in recurrent layers cannot be repeated for parts.

    Args:
        models: The models whose modules are changed inside the context.
        of: Function that returns the modules of a model to put into evaluation mode.
    """
    models = list(models)
    modes = {module: module.training for model in models for module in of(model)}
    modules = [module for model in models for module in model.modules()]
    dropout = {module: module.dropout for module in modules if isinstance(module, nn.RNNBase)}
    try:
        for module in modes:
            # cuDNN does not support backward through a recurrent layer in evaluation mode.
            module.training = module in dropout
        for module in dropout:
            module.dropout = 0.0
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, rate in dropout.items():
            module.dropout = rate


def mixing_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that, in their current mode, compute statistics over the samples."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _NormBase)
        and module.training
        and (isinstance(module, _BatchNorm) or module.track_running_stats)
    ]


def run_in_copy(run: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    """Run a check in a forked copy of this process, and return its result.

    If memory is short, the check is repeated in another copy without oneDNN. oneDNN creates and
    caches a kernel for each new size. If the allocation of a kernel fails, oneDNN either creates no
    more kernels in that process, or crashes it.
    """
    result = _result_of_copy(run)
    if result.short_of_memory and onednn.is_on():

        def without_onednn() -> SplitCheckResult:
            # Only the forked copy runs without oneDNN.
            onednn.switch_off()
            return run()

        result = _result_of_copy(without_onednn)
    return result


def _result_of_copy(run: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    try:
        return SplitCheckResult.from_json(run_in_forked_copy(lambda: asdict(run())))
    except NoAnswer as error:
        return SplitCheckResult(
            outcome="unknown",
            why=str(error),
            short_of_memory=error.died,
            fork_failed=error.not_made,
        )
    except MemoryError as error:
        # This process ran out of memory while forking the copy or reading the result.
        return SplitCheckResult(
            outcome="unknown",
            why=f"no memory for a copy of this process ({error})",
            fork_failed=True,
        )


def run_check(run: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    """Return the result of a check, or an "unknown" result with the reason if the check fails."""
    try:
        # The check runs in eager mode. Otherwise, torch would compile code for the sizes of the
        # trial. A forked copy cannot do so, because a fork does not copy the compiler's threads.
        with eager():
            return run()
    except CalledInsideError as error:
        return SplitCheckResult(outcome="unknown", called=error.called)
    except Exception as error:  # noqa: BLE001 - the user's loss may raise anything for 3 samples
        first = (str(error).strip().splitlines() or [""])[0]
        short = find_out_of_memory(error) is not None
        return SplitCheckResult(
            outcome="unknown", why=f"{type(error).__name__}: {first}"[:300], short_of_memory=short
        )
