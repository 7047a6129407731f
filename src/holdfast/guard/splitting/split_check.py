"""Find out, before memory is short, whether splitting a batch leaves its gradient unchanged, and by
which weights.

The gradient over 4 samples is compared with the weighted gradients over 3 and 1 of them. If the
loss function does not say what its mean is over, everything in the batch that it may be over is
tried. If nothing reproduces the gradient, samples are coupled (in-batch negatives, a pairwise
loss). Models are in training mode, but for layers such as BatchNorm, which `SplitSafety` knows.
Parts are given the random numbers that the whole has drawn for their samples. Where that cannot be
done, none is made but of declared items, which are then compared in evaluation mode.

On the CPU this runs in a forked copy of the process, so it leaves no trace in this one. With an
accelerator a fork is not possible; there it runs in place, only when a split is about to be made,
and the caller puts everything back.
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
from holdfast.guard.splitting.loss_functions import Called, CalledInsideError, find_side_effects
from holdfast.guard.splitting.selection import MASK, SelectionFinder
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

_SAMPLES = 4
# Rounding of 3 + 1 against 4 samples stays below 1e-5 in fp32; coupled losses differ by 0.01 and
# more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 5e-2
# A small sum beside a mean differs by less, and grows with the batch. Rounding does not reach both
# of these.
_SMALL, _SMALL_OF_LOSS = 2e-5, 3e-6
# Losses are means of terms that do not cancel, so on devices and in half precision they differ less
# than gradients.
_OF_LOSS_WHERE_ROUNDED = 0.1
# Weights that differ by less make gradients that differ by less than a coupled loss does
TELLING = 0.01
_MOST_WINDOWS = 4
# For each comparison with random numbers that all samples share; others for the next one
_SEEDS = 3
_MOST_EMPTY, _MOST_ONE_BY_ONE = 2, 256
_LOOKED_THROUGH = 64  # windows: cutting and counting one takes a tenth of a millisecond
_NOT_REPEATABLE = (
    "called again, the loss gives another gradient: it carries state, or its random numbers cannot"
    " be given to parts (a permutation, a generator of numpy), so that it cannot be tried whether"
    " these make up the whole"
)
# Shares of a micro-batch in the first of the two parts that it is compared with
_HALVES, _QUARTERS = 0.5, 0.75
_Parts: TypeAlias = Sequence[tuple[Any, int]]
# Each sample's own; for all samples together, which each part then draws anew; or they could not be
# given to parts.
Draw: TypeAlias = Literal["none", "own", "shared", "unknown"]
_DRAWS: tuple[Draw, ...] = ("none", "own", "shared", "unknown")  # from best to worst
Outcome: TypeAlias = Literal["exact", "coupled", "random", "trusted", "unknown"]
# Unknown yields to any other
_FROM_BEST_TO_WORST: tuple[Outcome, ...] = ("unknown", "exact", "random", "coupled")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCheckResult:
    """What a check has shown.

    ``"exact"``: splitting keeps the gradient. ``"coupled"``: it does not, or that could not be
    shown. ``"random"``: it would with the same random numbers, or the caller says so.
    ``"trusted"``: the caller says that it is exact. ``"unknown"``: it could not be tried.
    """

    outcome: Outcome
    # Relative L2 difference of the gradients, weighted as they will be
    difference: float = float("nan")
    # The loss function says what its mean is over, or takes the outputs of all samples
    declared: bool = False
    changes_batch: bool = False  # the loss function changes the tensors of its batch
    # Name of a buffer, other than running statistics, that a forward pass changes
    changed_buffer: str = ""
    # For ``"unknown"``, what went wrong; for ``"coupled"``, why it could not be shown
    why: str = ""
    draws: Draw = "none"  # random numbers in training
    # For ``"unknown"``, whether that was, or may have been, a lack of memory
    short_of_memory: bool = False
    # Weightings by which the parts make up the whole, the most usual first
    held: tuple[Weighting, ...] = ()
    failed: tuple[Weighting, ...] = ()  # weightings by which they do not
    side_effects: tuple[str, ...] = ()  # attributes of modules that each forward pass changes
    # The function by which the loss selects samples, such as ``"topk"``; empty: none
    selects: str = ""
    called: Called | None = None  # what the loss function called that is the guard's to call
    not_made: bool = False  # for ``"unknown"``: this process could not be copied for the trial

    def weighting(self) -> Weighting:
        """Return what the parts of a batch are weighted by, where the loss function does not say
        it.
        """
        return self.held[0] if self.held else SAMPLES

    def may_turn_wrong(self) -> bool:
        """Return whether splitting may change the gradient later, although it did not in the
        trials.

        A loss that chooses samples may have chosen all of them so far. Of a sum over the samples
        that a threshold chooses, each part adds its own.
        """
        is_sum = not self.declared and self.weighting().kind == "sum"
        return bool(self.selects) and not (is_sum and self.selects == MASK)

    def facts(self) -> dict[str, Any]:
        """Return what is worth recording, as JSON values."""
        found = asdict(self)
        found["held"] = [str(weighting) for weighting in self.held]
        return {
            name: value
            for name, value in found.items()
            if name not in ("failed", "side_effects", "called", "not_made")
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SplitCheckResult:
        """Rebuild a verdict from ``asdict`` of it."""
        lists = {
            name: tuple(Weighting(**{**each, "keys": tuple(each["keys"])}) for each in values[name])
            for name in ("held", "failed")
        }
        return cls(**{**values, **lists, "side_effects": tuple(values["side_effects"])})


def merged(verdicts: Sequence[SplitCheckResult], **facts: Any) -> SplitCheckResult:
    """Return what verdicts promise together: the least. A weighting holds if it never failed."""
    chosen = max(verdicts, key=lambda verdict: _FROM_BEST_TO_WORST.index(verdict.outcome))
    failed = tuple(dict.fromkeys(weighting for verdict in verdicts for weighting in verdict.failed))
    every = dict.fromkeys(weighting for verdict in verdicts for weighting in verdict.held)
    held = tuple(
        sorted((weighting for weighting in every if weighting not in failed), key=Weighting.rank)
    )
    together: dict[str, Any] = {
        "changes_batch": any(verdict.changes_batch for verdict in verdicts),
        "draws": max((verdict.draws for verdict in verdicts), key=_DRAWS.index),
        "changed_buffer": next(
            (verdict.changed_buffer for verdict in verdicts if verdict.changed_buffer), ""
        ),
        "side_effects": tuple(
            dict.fromkeys(name for verdict in verdicts for name in verdict.side_effects)
        ),
        "selects": next((verdict.selects for verdict in verdicts if verdict.selects), ""),
    }
    if chosen.outcome in ("exact", "random") and failed and not held:
        # What held for one batch failed for another
        together |= {"outcome": "coupled", "difference": math.nan}
    elif chosen.outcome == "exact":
        together["difference"] = max(
            verdict.difference for verdict in verdicts if verdict.outcome == "exact"
        )
    return replace(chosen, held=held, failed=failed, **{**together, **facts})


class _Difference(NamedTuple):
    """How far the parts of a batch are from the whole."""

    of_gradients: float  # L2 norm, relative
    of_losses: float  # relative


@dataclass(slots=True, kw_only=True)
class SplitCheck:
    """What is tried out."""

    loss_fn: Callable[[Any], Any]  # is given copies
    split: Split
    states: StateKeeper  # what is as before for each evaluation; it is compared after each
    models: Mapping[str, nn.Module]
    # Whose gradients are compared; their ``.grad`` is overwritten and emptied
    parameters: Sequence[torch.Tensor]
    # The context in which a loss function is called
    calling: Callable[[], contextlib.AbstractContextManager[Any]]
    rounds_to_half: bool  # whether that context rounds to half precision
    # Whether this process is a copy that is thrown away, so that side effects can be looked for
    in_a_copy: bool
    # What the mean of the loss was found to be over in earlier batches
    known: Sequence[Weighting] = ()
    has_passed: bool = False  # whether splitting kept the gradient in earlier batches
    _draws: Draws | None = field(default=None, init=False)
    _seed: int = field(default=0, init=False)
    _buffers: BufferKeeper | None = field(default=None, init=False)
    # Declares items, changes its batch
    _seen: tuple[bool, bool] = field(default=(False, False), init=False)
    # Share of the samples in the first part of what is compared. None: all but one.
    _first_share: float | None = field(default=None, init=False)
    # Found: states that the parts leave otherwise than the whole
    uneven: list[str] = field(default_factory=list)

    def run(self, batch: Any, size: int, empty: int | None = None) -> SplitCheckResult:
        """Compare samples from the beginning and from all over a batch, and more where candidates
        disagree.

        `empty` is a sample that is known to hold nothing that counts, by the loss function's own
        word.
        """
        self.states.keep()
        windows = [
            w for w, few in micro_batches(batch, size, min(_SAMPLES, size), self.split) if few > 1
        ]
        if not callable(self.split) and size > _SAMPLES:  # what is far apart in a batch may differ
            windows[1:] = [
                *windows[1:-1],
                select(batch, size, [0, 1, size // 2, size - 1], self.split),
            ]
        changed_buffer = self._find_changed_buffer(windows[0])
        side_effects = self._side_effects(windows[0]) if self.in_a_copy else ()
        weightings = list(dict.fromkeys([*find_weightings(batch, size), *self.known]))
        with self._trying():
            found = self._through(windows, weightings)
            if not callable(self.split):
                found += self._with_an_empty_sample(batch, size, weightings, empty)
                found += self._of_one_label(windows[0], batch, weightings)
            selects = self._find_selection(windows[0])
        changed_buffer = changed_buffer or next(iter(self.uneven), "")
        return merged(
            found, changed_buffer=changed_buffer, side_effects=side_effects, selects=selects
        )

    def compare_halves(self, part: Any, size: int) -> SplitCheckResult:
        """Compare the gradient of a micro-batch, of a size that fits, with that of its two halves.

        A loss may begin to couple samples, or to choose among them, long after the trials of the
        first steps. Four samples show that less often than a whole micro-batch does. The largest
        quarter of eight losses is that of both halves if these hold one of the two each: so that is
        followed by a cut into three quarters and one.
        """
        self.states.keep()
        weightings = list(dict.fromkeys([*find_weightings(part, size), *self.known]))
        compared: list[SplitCheckResult] = []
        with self._trying():
            for share in (_HALVES, _QUARTERS) if size >= _SAMPLES else (_HALVES,):
                self._first_share = share
                found = self._compare_if_it_fits(part, weightings)
                compared.append(replace(found, why=found.why or _why_apart(found, size)))
                if found.outcome == "coupled":
                    break
            selects = self._find_selection(part)
        changed_buffer = next(iter(self.uneven), "")
        return merged(compared, changed_buffer=changed_buffer, selects=selects)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Run evaluations in training mode, except for layers that mix samples, and restore
        buffers and states.
        """
        self._buffers = BufferKeeper(dict(self.models))
        self._buffers.keep()
        # The dropout of attention is to be drawn where it can be seen, not inside a kernel.
        plain = sdpa_kernel(SDPBackend.MATH) if self._devices() else contextlib.nullcontext()
        with _modes(self.models.values(), mixing_layers), plain, torch.enable_grad():
            yield
        self._begin(0)

    def look(self, batch: Any, size: int | None, *, logs_too: bool = False) -> SplitCheckResult:
        """Return only what a forward pass over some samples leaves behind.

        Over all, if they cannot be cut.

        `logs_too`: also what has no effect on the next loss: a log, or a counter that may have one
        later.
        """
        self.states.keep()
        few = (
            batch
            if size is None
            else micro_batches(batch, size, min(_SAMPLES, size), self.split)[0][0]
        )
        return SplitCheckResult(
            outcome="trusted", side_effects=self._side_effects(few, logs_too=logs_too)
        )

    def _side_effects(self, window: Any, *, logs_too: bool = False) -> tuple[str, ...]:
        buffers = BufferKeeper(dict(self.models), self.states)
        buffers.keep()

        def forward() -> float:
            loss = self._forward_once(window)
            buffers.put_back()
            return loss

        return find_side_effects(
            self.models, self.loss_fn, forward, known=self.states.objects(), logs_too=logs_too
        )

    def _through(
        self, windows: Sequence[Any], weightings: Sequence[Weighting]
    ) -> list[SplitCheckResult]:
        left = [windows[0], *windows[1:][-1:]]
        others = list(windows[1:-1][:_LOOKED_THROUGH])
        found: list[SplitCheckResult] = []
        while left:
            found.append(self._compare_if_it_fits(left.pop(0), weightings))
            failed = {weighting for verdict in found for weighting in verdict.failed}
            alive = [weighting for weighting in weightings if weighting not in failed]
            if (
                left
                or found[-1].declared
                or found[-1].outcome != "exact"
                or len(found) >= _MOST_WINDOWS
            ):
                continue
            telling = [disagreement(alive, self._cut(window)) for window in others]
            if len(alive) > 1 and telling and max(telling) > TELLING:
                left.append(others.pop(telling.index(max(telling))))
        return found

    def _with_an_empty_sample(
        self, batch: Any, size: int, weightings: Sequence[Weighting], empty: int | None
    ) -> list[SplitCheckResult]:
        """Compare three samples and one that holds nothing to count.

        It may have a loss all the same.
        """
        one_by_one = micro_batches(batch, size, 1, self.split)[:_MOST_ONE_BY_ONE]
        chosen = [
            tuple(with_an_empty_one(weighting, one_by_one, _SAMPLES)) for weighting in weightings
        ]
        if empty is not None:
            chosen.insert(
                0, (*[place for place in range(size) if place != empty][: _SAMPLES - 1], empty)
            )
        return [
            self._compare_if_it_fits(select(batch, size, places, self.split), weightings)
            for places in list(dict.fromkeys(filter(None, chosen)))[:_MOST_EMPTY]
        ]

    def _of_one_label(
        self, window: Any, batch: Any, weightings: Sequence[Weighting]
    ) -> list[SplitCheckResult]:
        """Compare these samples as if all had the rarest label of the batch, which 4 samples
        seldom show.
        """
        size, before, labels = batch_size(batch, self.split), len(self.uneven), []

        def relabelled(leaf: Any, whole: Any) -> Any:
            if (
                not isinstance(leaf, torch.Tensor)
                or whole.shape != (size,)
                or leaf.is_floating_point()
            ):
                return leaf
            values, counts = torch.unique(whole, return_counts=True)
            labels.append(leaf)
            return torch.full_like(leaf, values[counts.argmin()])

        found = []
        self._begin(0)
        states = self.states.now()
        # They may be lengths, or rows of a table, and fit nothing else
        with contextlib.suppress(Exception):
            alike = pytree.tree_map(relabelled, window, batch)
            if labels:
                found.append(self._compare(alike, weightings, SplitCheck._difference))
        # They may be those of a state, which passes write
        rows = not same(states, self.states.now())
        del self.uneven[before:]
        self._clear()
        if rows or not found or found[0].why:  # what is not known here shows elsewhere
            return []
        differs = f"differs by {found[0].difference:.1%} from that over 3 + 1 of them"
        why = (
            f"the gradient over 4 samples of one label {differs}"
            if found[0].outcome == "coupled"
            else ""
        )
        return [replace(found[0], why=why)]

    def _cut(self, window: Any) -> _Parts:
        few = batch_size(window, self.split)
        first = few - 1
        if self._first_share is not None:
            first = min(first, math.ceil(self._first_share * few))
        return micro_batches(window, few, first, self.split)

    def _compare_if_it_fits(self, window: Any, weightings: Sequence[Weighting]) -> SplitCheckResult:
        """Compare gradients of 4 samples, else of 2, else only their losses, which needs far
        less memory.
        """
        pair = micro_batches(window, batch_size(window, self.split), 2, self.split)[0][0]
        gradients, losses = SplitCheck._difference, SplitCheck._difference_of_losses
        tries = [(window, gradients), (pair, gradients), (pair, losses)]
        for number, (samples, compare) in enumerate(tries, start=1):
            try:
                return self._compare(samples, weightings, compare)
            except Exception as error:
                if find_out_of_memory(error) is None or number == len(tries):
                    raise
                failure = error
            finally:
                self._clear()
            clear_exception_frames(failure)
        raise AssertionError

    def _compare(
        self, window: Any, weightings: Sequence[Weighting], compare: _Compared
    ) -> SplitCheckResult:
        """Compare these samples as a whole with all but one and the last one, by each weighting."""
        found = self._compare_as_it_is(window, weightings, compare)
        if found.draws != "unknown" or not found.declared:
            return found
        with _modes(self.models.values(), nn.Module.modules):  # it may be drawn in training alone
            found = self._compare_as_it_is(window, weightings, compare)
        if found.outcome in ("exact", "random"):
            return replace(
                found,
                outcome="random",
                draws="own" if isinstance(self.loss_fn, TwoPass) else "unknown",
            )
        return found

    def _compare_as_it_is(
        self, window: Any, weightings: Sequence[Weighting], compare: _Compared
    ) -> SplitCheckResult:
        if isinstance(self.loss_fn, TwoPass):
            return self._compare_with(None, window, weightings, compare)

        def drawn(*, in_order: bool = False) -> SplitCheckResult:
            draws = Draws(self._devices(), self._least_tolerance(), self._seed, in_order=in_order)
            try:
                found = self._compare_with(draws, window, weightings, compare)
            # What is drawn for one sample after the other is the same all by itself
            except NotRepeatableError:
                found = self._compare_with(None, window, weightings, compare)
                return (
                    replace(found, outcome="random", draws="own")
                    if found.outcome == "exact"
                    else found
                )
            tries_again = found.draws == "unknown" and draws.outside_torch and not in_order
            return drawn(in_order=True) if tries_again else found

        found = drawn()
        for _ in range(1, _SEEDS):
            # It may decide whether samples are mixed
            if found.outcome == "random" and found.draws == "shared":
                self._seed += 1
                found = merged([found, drawn()])
        return found

    def _compare_with(
        self, draws: Draws | None, window: Any, weightings: Sequence[Weighting], compare: _Compared
    ) -> SplitCheckResult:
        self._draws = draws
        whole, parts = [(window, batch_size(window, self.split))], self._cut(window)
        by_samples = compare(self, whole, parts, SAMPLES, 0)
        declared, changes = self._seen
        if math.isnan(by_samples.of_gradients):
            why = "its gradient is zero, or not finite"
            return SplitCheckResult(
                outcome="unknown", declared=declared, changes_batch=changes, why=why
            )
        found: dict[Any, _Difference] = {shares(SAMPLES, parts): by_samples}
        weights = {} if declared else {each: shares(each, parts) for each in weightings}
        for each, weight in weights.items():
            if weight is not None and weight not in found:
                found[weight] = compare(self, whole, parts, each, 0)
        held = [
            each
            for each, weight in weights.items()
            if weight is not None and self._fits(found[weight])
        ]
        outcome: Outcome = "exact" if held or (declared and self._fits(by_samples)) else "coupled"
        why = ""
        drawn: Draw = (
            "none" if draws is None or not draws.drew else "shared" if draws.shared else "own"
        )
        if outcome == "exact" and drawn != "none":
            outcome = "random"
        elif outcome == "coupled" and self._is_unrepeatable(draws, whole, compare):
            drawn = "unknown"
            outcome, why = ("random", "") if declared else ("coupled", _NOT_REPEATABLE)
        return SplitCheckResult(
            outcome=outcome,
            difference=(found[weights[held[0]]] if held else by_samples).of_gradients,
            declared=declared,
            changes_batch=changes,
            why=why,
            draws=drawn,
            held=tuple(held),
            # What these samples hold nothing of was not tried.
            failed=tuple(
                each for each, weight in weights.items() if each not in held and weight is not None
            ),
        )

    def _fits(self, found: _Difference) -> bool:
        fine = found.of_gradients <= _SMALL or found.of_losses <= _SMALL_OF_LOSS
        # TF32 rounds by more
        measures = not self._devices() and self._least_tolerance() != _HALF_TOLERANCE
        return found.of_gradients <= self._least_tolerance() and (fine or not measures)

    def _is_unrepeatable(self, draws: Draws | None, whole: _Parts, compare: _Compared) -> bool:
        """Say whether the whole differs from itself, so that parts that differ from it prove
        nothing.
        """
        if draws is not None and draws.outside_torch:
            return True
        if isinstance(self.loss_fn, TwoPass) and not self._fits(
            compare(self, whole, whole, SAMPLES, 0)
        ):
            raise RuntimeError(
                "the outputs of a TwoPass draw from a generator of their own, which two passes"
                " share"
            )
        return not self._fits(compare(self, whole, whole, SAMPLES, 1))

    def _difference(
        self, whole: _Parts, parts: _Parts, weighting: Weighting, seed: int
    ) -> _Difference:
        """Compare gradients and losses; NaN if the gradient of the whole is zero or not finite."""
        self._clear()
        self._begin(0, whole)
        expected = self._accumulate(whole, whole, SAMPLES)
        norm, left = self._norm(), self.states.now()
        if not math.isfinite(norm) or norm == 0:
            return _Difference(math.nan, 0.0)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = -parameter.grad
        self._begin(seed)
        found, tolerance = self._accumulate(parts, whole, weighting), self._least_tolerance()
        now = self.states.now()
        self.uneven.extend(
            name for name in left if not same(left[name], now[name], tolerance=tolerance)
        )
        of_losses = abs(found - expected) / (abs(expected) or 1.0)
        if self.has_passed and self._is_rounding(expected, found):
            return _Difference(0.0, of_losses)
        return _Difference(_finite_or_inf(self._norm() / norm), of_losses)

    def _is_rounding(self, expected: float, found: float) -> bool:
        """Say whether two losses are the same sum, whatever their gradients.

        Near a minimum the gradients of samples cancel and what is left of them is rounding, and a
        loss near zero is the rounding of its logits: neither says that samples are coupled.
        """
        is_exact = not self._devices() and self._least_tolerance() != _HALF_TOLERANCE
        allowed = _SMALL_OF_LOSS if is_exact else self._least_tolerance() * _OF_LOSS_WHERE_ROUNDED
        return abs(found - expected) <= allowed * max(1.0, abs(expected))

    def _difference_of_losses(
        self, whole: _Parts, parts: _Parts, weighting: Weighting, seed: int
    ) -> _Difference:
        """Compare losses in place of gradients.

        Coupled samples change them too, but for rare constructions.
        """
        if isinstance(self.loss_fn, TwoPass):
            return _Difference(0.0, 0.0)  # one loss of all samples, whatever the parts

        def value(parts: _Parts, weighting: Weighting) -> float:
            return math.fsum(
                float(loss.detach()) for loss in self._losses(parts, weighting, needs_graph=False)
            )

        self._begin(0, whole)
        expected = without_graph(lambda: value(whole, SAMPLES))
        self._begin(seed)
        found = without_graph(lambda: value(parts, weighting))
        gap = _finite_or_inf(abs(found - expected) / (abs(expected) or 1.0))
        return _Difference(gap if math.isfinite(expected) else math.nan, 0.0)

    def _accumulate(self, parts: _Parts, whole: _Parts, weighting: Weighting) -> float:
        """Add the gradient of the mean over these parts to ``.grad``, part by part.

        Return that mean.
        """
        if isinstance(self.loss_fn, TwoPass) and parts is not whole:
            run = TwoPassRun(
                call=self._called,
                backward=lambda loss, inputs: loss.backward(inputs=inputs),  # type: ignore[no-untyped-call]
                keeper=lambda: BufferKeeper(dict(self.models)),
                devices=self._devices(),
                inputs=self._reached,
            )
            return float(run.accumulate(self.loss_fn, whole[0][0], parts).total().detach())
        losses = self._losses(parts, weighting)
        for loss in losses:
            if loss.requires_grad:  # else nothing in these samples counts
                with contextlib.nullcontext() if self._draws is None else self._draws.backward():
                    loss.backward(inputs=self._reached())  # type: ignore[no-untyped-call]
        return math.fsum(float(loss.detach()) for loss in losses)

    def _reached(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def _losses(
        self, parts: _Parts, weighting: Weighting, *, needs_graph: bool = True
    ) -> list[torch.Tensor]:
        """Return the loss of each part, weighted by what is declared, else by `weighting`."""
        read, first = [], 0
        for part, samples in parts:
            with (
                contextlib.nullcontext()
                if self._draws is None
                else self._draws.call(first, samples)
            ):
                read.append(self._terms(part, samples, needs_graph=needs_graph))
            first += samples
        if len(parts) == 1:
            self._seen = read[0][0].declared or isinstance(self.loss_fn, TwoPass), read[0][1]
        terms = [each for each, _ in read]
        rows = [[weight] for weight in shares(weighting, parts) or (0.0,) * len(parts)]
        if terms[0].declared:
            counts = [each.read()[1] for each in terms]
            totals = [sum(column) for column in zip(*counts, strict=True)]
            rows = [
                [count / (total or 1.0) for count, total in zip(row, totals, strict=True)]
                for row in counts
            ]
        return [
            sum(
                (m * w for m, w in zip(each.means, row, strict=True) if w),
                torch.zeros_like(each.means[0]),
            )
            for each, row in zip(terms, rows, strict=True)
        ]

    def _terms(self, part: Any, samples: int, *, needs_graph: bool = True) -> tuple[Terms, bool]:
        """Return what the loss function says about a copy, and whether it has changed the copy."""
        given = copied(part)
        tensors = tensors_in(given)
        versions = versions_of(tensors)
        with self.calling():
            terms = read_loss(self.loss_fn(given), samples, needs_graph=needs_graph)
        return terms, versions_of(tensors) != versions

    def _called(self, function: Callable[[Any], Any], part: Any) -> Any:
        with self.calling():
            return function(copied(part))

    def _find_selection(self, window: Any) -> str:
        """Return the name of the function by which the loss selects samples, or an empty string.

        A selection is one among samples if the dimension from which it selects grows with their
        number.
        """
        few = batch_size(window, self.split)
        selections = []
        for part, _ in [(window, few), self._cut(window)[0]]:
            finder = SelectionFinder(self.models.values())
            # The trials have shown that the loss can be called. If tracing fails, selections are
            # just not detected.
            terms = None
            with contextlib.suppress(Exception), finder:
                terms = self._terms_once(part)
            if terms is None:
                return ""
            # With declared items, each part is weighted by the items that its threshold selects,
            # which is exact.
            reaching = finder.reaching(terms.means)
            selections.append(
                [each for each in reaching if not (terms.declared and each.function == MASK)]
            )
        whole, part = selections
        if len(whole) != len(part):
            # A selection for each sample is not one among samples. One that was made in only one of
            # two runs is.
            return "" if whole and part else (whole or part)[0].function
        grown = [
            first.function
            for first, second in zip(whole, part, strict=True)
            if first.size != second.size
        ]
        return next(iter(grown), "")

    def _forward_once(self, window: Any) -> float:
        """Run the loss function in training mode and return the loss.

        Where memory is too short for that, NaN.
        """
        terms = self._terms_once(window)
        return math.nan if terms is None else float(terms.total().detach())

    def _terms_once(self, window: Any) -> Terms | None:
        """Run the loss function once and return its terms, or None if memory is too short."""
        self._begin(0)
        try:
            # With gradients, as in training: a loss function may change things only then
            if self.in_a_copy:
                with torch.enable_grad():
                    found = self._called(self.loss_fn, window)
            else:
                found = without_graph(lambda: self._called(self.loss_fn, window))
            return read_loss(found, None, needs_graph=False)
        except Exception as error:
            if find_out_of_memory(error) is None:
                raise
            return None

    def _find_changed_buffer(self, window: Any) -> str:
        """Return the name of a buffer, other than running statistics, that a forward pass
        changes, or "".
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
        gradients = [p.grad.to_dense() for p in self.parameters if p.grad is not None]
        wide = [
            gradient if gradient.dtype in _TOLERANCE else gradient.float() for gradient in gradients
        ]
        norms = [torch.linalg.vector_norm(gradient).double().cpu() for gradient in wide]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def _begin(self, seed: int, whole: _Parts | None = None) -> None:
        """Let an evaluation begin where every other does.

        If it is of the whole, note what is drawn.
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


def _why_apart(found: SplitCheckResult, size: int) -> str:
    """Return a sentence about the difference between a micro-batch and its parts if it is too
    large.
    """
    if found.outcome != "coupled":
        return ""
    share = "is finite, and that over its parts is not"
    if math.isfinite(found.difference):
        share = f"differs by {found.difference:.2%} from that over two parts of it"
    return f"the gradient over a micro-batch of {size} samples {share}"


_Compared: TypeAlias = Callable[[SplitCheck, _Parts, _Parts, Weighting, int], _Difference]


def _finite_or_inf(difference: float) -> float:
    return difference if math.isfinite(difference) else math.inf


@contextlib.contextmanager
def _modes(
    models: Iterable[nn.Module], of: Callable[[nn.Module], Iterable[nn.Module]]
) -> Iterator[None]:
    """Set what `of` returns of each model to evaluation.

    No recurrent layer drops anything, which is not repeated.
    """
    models = list(models)
    modes = {module: module.training for model in models for module in of(model)}
    every = [module for model in models for module in model.modules()]
    dropout = {module: module.dropout for module in every if isinstance(module, nn.RNNBase)}
    try:
        for module in modes:
            # cuDNN refuses the backward of a recurrent layer in evaluation: only its dropout goes.
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
    """Return the layers that take statistics over the samples of one forward pass, as the model
    is now.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, _NormBase)
        and module.training
        and (isinstance(module, _BatchNorm) or module.track_running_stats)
    ]


def in_a_copy(run: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    """Return the verdict of a copy of this process.

    If it was short of memory, that of another one without oneDNN.

    Other sizes need new kernels, and each is kept. Where memory for one is refused, oneDNN makes no
    more of them in that process, or ends it.
    """
    found = _asked(run)
    if found.short_of_memory and onednn.is_on():

        def without_onednn() -> SplitCheckResult:
            onednn.switch_off()  # in a copy, which is thrown away
            return run()

        found = _asked(without_onednn)
    return found


def _asked(run: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    try:
        return SplitCheckResult.from_json(run_in_forked_copy(lambda: asdict(run())))
    except NoAnswer as error:
        return SplitCheckResult(
            outcome="unknown", why=str(error), short_of_memory=error.died, not_made=error.not_made
        )
    except MemoryError as error:  # of this process, around the copy
        return SplitCheckResult(
            outcome="unknown", why=f"no memory for a copy of this process ({error})", not_made=True
        )


def attempted(run: Callable[[], SplitCheckResult]) -> SplitCheckResult:
    """Return the verdict, or say why there is none."""
    try:
        # Its sizes would be compiled for, and a copy of this process has no threads that compile
        with eager():
            return run()
    except CalledInsideError as error:
        return SplitCheckResult(outcome="unknown", called=error.called)
    except Exception as error:  # noqa: BLE001 - whatever the caller's loss does with 3 samples is an answer
        first = (str(error).strip().splitlines() or [""])[0]
        short = find_out_of_memory(error) is not None
        return SplitCheckResult(
            outcome="unknown", why=f"{type(error).__name__}: {first}"[:300], short_of_memory=short
        )
