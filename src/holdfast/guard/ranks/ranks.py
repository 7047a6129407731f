"""Several ranks that train one model: they run the same steps and reach the same decisions.

A normal step adds one small gather, which runs during backward. A rank that runs out of memory
completes the collectives that the others are waiting for, with NaN, and all ranks attempt the step
again. A rank that fails in any other way tells the others why, and all of them end.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from holdfast.checkpoint.saver import Writers
from holdfast.core.errors import BatchError, OutOfMemoryError, PolicyError, RankError
from holdfast.core.events.run_events import OwnCollectives, RankIsSlow
from holdfast.core.policy.policy import Policy
from holdfast.guard.cursor import Cursor
from holdfast.guard.ranks.arrival import watch_arrival
from holdfast.guard.ranks.messages import Messages, SharedWriters, out_of_step
from holdfast.guard.ranks.one import PLACE, OneRank, Saves
from holdfast.guard.ranks.own_tensors import Digests, Kinds, differing_names, select
from holdfast.guard.ranks.pace import Pace, peak_bytes
from holdfast.guard.ranks.replicated import Replicated
from holdfast.guard.ranks.row import EPOCH_END, STEP, Column, PendingRow, Place, Rows, Said
from holdfast.guard.ranks.sharded import Sharded
from holdfast.guard.ranks.shared_state import healthy, take_state, without_help
from holdfast.guard.ranks.tape import Tape
from holdfast.guard.result import PassResult, Provenance, StepAttempt
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest
from holdfast.loader.random_state import RandomState, of_another_rank
from holdfast.memory.ladder import StepPlan
from holdfast.memory.oom import find_out_of_memory, release_memory
from holdfast.numerics.gradients import local
from holdfast.numerics.loss import Terms, check_count

_T = TypeVar("_T")
# How long a rank that ends with an error waits for the writers of all ranks.
_WRITER_SECONDS = 2.0
# The result of an attempt on a rank: made, failed, or impossible because the optimizer of this rank
# has failed in the last step.
_MADE, _FAILED, _BEHIND = range(3)
# Fields of the policy that are restricted with several ranks, with the values that are allowed.
_REFUSED = {"drop_nonfinite_samples": (False,)}


class Ranks(OneRank):
    """The ranks of a process group, seen from one of them.

    Args:
        model: The model, replicated or sharded.
        optimizer: The optimizer.
        averages: Averages of the weights, which are equal on all ranks.
    """

    def __init__(
        self, model: Replicated | Sharded, optimizer: Optimizer, averages: Iterable[nn.Module] = ()
    ) -> None:
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        # Some methods exist only on a replicated model.
        self._model: Any = model
        self._optimizer = optimizer
        self._averages = list(averages)
        self.norms = model.norms
        # Whether the last attempt has failed on this rank.
        self._has_failed = False
        # Whether the optimizer has failed in its step on this rank, while other ranks have stepped.
        self._is_behind = False
        self._messages = Messages(self.rank, self.world_size)
        watch_arrival(model.group, self._messages)
        self.open = self._messages.open
        self.close = self._messages.close
        self.shares = model.shares
        self.ignored = model.ignored
        self.writers = Writers() if self.rank == 0 else None
        self._tape = Tape(self._messages)
        model.record(self._tape)
        if isinstance(model, Sharded):
            self.plan = self._plan_of_failed
            self.share = partial(model.share, is_first=self.rank == 0)
            self.writers = SharedWriters(self.rank, self._messages)
        self._pace = Pace(self.world_size)
        self._digests = Digests()
        self._pending: PendingRow | None = None
        # The rows of the last step.
        self._rows: Rows | None = None
        # The number of items by which each rank divides its own. It is the same on all ranks.
        self._reference: float | None = None
        # The value of `_reference` before this step.
        self._before: float | None = None
        # Whether the numbers of items in this step must be whole.
        self._counted = False
        # Whether this rank is running the model without the others.
        self._is_alone = False
        # Whether only this rank splits its batch, because it ran out of memory.
        self._splits_by_itself = False
        # The number of collectives of the loss or the model in the last attempt that succeeded on
        # all ranks.
        self._own_collectives = 0
        # Whether there have been any such collectives.
        self._has_own_collectives = False
        self._news: OwnCollectives | None = None
        self._stop: _Stop | None = None
        self._saves: _Saves | None = None
        self._cursor: Cursor | None = None

    @property
    def has_parted(self) -> bool:
        """Return whether this rank has left the group, so that the others no longer answer it."""
        return self._messages.has_left or self._messages.has_parted

    def policy(self, policy: Policy) -> Policy:
        """Return the policy with the features disabled that these ranks do not support.

        Raises:
            PolicyError: H108 for an unsupported feature that was enabled explicitly.
        """
        for name, allowed in {**_REFUSED, **self._model.refused}.items():
            if getattr(policy, name) not in allowed:
                raise _not_yet(f"{name}={getattr(policy, name)!r}")
        self._model.scales = policy.precision == "fp16"
        # These features would make a single rank act without the others.
        return replace(
            policy,
            forecast_micro_batch_size=None,
            snapshot_interval_steps=None,
            **self._model.unobserved,
        )

    def agreed(
        self, stop: StopRequest, saving: Saving, cursor: Cursor | None
    ) -> tuple[StopRequest, Saves]:
        """Return objects that follow the stop requests and saves exchanged in each step."""
        self._cursor = cursor
        self._stop = _Stop(stop, self._messages)
        self._saves = _Saves(saving, self._messages, cursor)
        return self._stop, self._saves

    # --- a step

    def weighed(self, terms: Terms) -> torch.Tensor:
        """Return the loss to run backward from, weighted by the items of this rank.

        The average of the gradients over the ranks then is that of the mean over all items.
        """
        loss = terms.total()
        items = terms.items[0]
        if self._is_alone:
            return loss
        self.check_terms(terms)
        weight = self._weight(loss.detach(), items, counted=terms.counted)
        return loss if isinstance(weight, float) and weight == 1.0 else loss * weight

    def check_terms(self, terms: Terms) -> None:
        """Raise H203 for a loss of several means, since ranks are weighted by one number."""
        if len(terms.means) > 1:
            raise BatchError(
                f"loss_fn returned {len(terms.means)} terms",
                limit="with several ranks, a loss must be a single mean over its items",
                fix="return a single Loss, or the sum of the means as a plain tensor.",
                rule="H203",
            )

    def _weight(self, loss: torch.Tensor, items: Any, *, counted: bool) -> Any:
        """Send the loss and the items of this rank, and return the weight of its gradient."""
        repeats = self._cursor is not None and self._cursor.repeats()
        if repeats:
            # Another rank trains on the same samples and counts them.
            items = 0.0
        self._pending = self._begin_row(loss, items, repeats=repeats, **self._pace.said())
        self._counted = counted
        return items / self._reference_for(items)

    def _begin_row(self, loss: Any, items: Any, **said: Any) -> PendingRow:
        """Start the exchange of a row.

        Args:
            loss: The loss of this rank.
            items: The number of items of this rank.
            **said: Further fields of the row; see `Said`.
        """
        self._messages.check_here()
        row = self._said(**said)
        self._model.row_begins()
        pending = PendingRow(row, loss, items, self._model.device, self._model.group)
        self._model.row_begun()
        return pending

    def _said(self, **said: Any) -> Said:
        """Return the row of this rank, with the stop request and, on the first rank, the save."""
        assert self._stop is not None
        assert self._saves is not None
        said |= {
            "stop": self._stop.said(),
            **(self._saves.said(said.get("kind", STEP)) if self.rank == 0 else {}),
        }
        return Said(
            number=self._messages.steps, guard=self._messages.guard, place=self._place(), **said
        )

    def _place(self) -> Place:
        """Return the position of this rank in its data; without a loader it is always the same."""
        cursor = self._cursor
        if cursor is None:
            return Place()
        return Place(cursor.epoch, cursor.batches, cursor.passed)

    def _reference_for(self, items: Any) -> float:
        """Return the number of items by which all ranks divide their own.

        It is the mean over the ranks in the last step, or the number in this step if that is equal
        on all ranks. With equal numbers the weight is exactly 1, so that the gradients are
        bit-identical to those of an unguarded loop. Only a rank whose number differs from that of
        the last step waits for the rows of the others.
        """
        assert self._pending is not None
        reference = self._reference
        if reference is None or (isinstance(items, (int, float)) and items != reference):
            rows = self._pending.rows()
            if rows.failed:
                # This attempt is discarded, so any value will do.
                return float(items)
            if reference is None or len({row[Column.ITEMS] for row in rows.each}) == 1:
                reference = rows.items / self.world_size
                self._reference = reference
        return reference

    def gathered(self, parameters: Sequence[torch.Tensor]) -> Rows:
        """Correct the gradients by the items of all ranks, and return the rows of all ranks.

        `weighed` has divided by a reference, which may differ from the mean number of items.
        """
        assert self._pending is not None
        rows = self._pending.rows()
        self._rows = rows
        if rows.failed:
            return rows
        self._notice(self._model.own_collectives())
        assert self._reference is not None
        for row in rows.each:
            items = row[Column.ITEMS]
            repeats = row[Column.REPEATS]
            # A rank may have 0 items only if it repeats samples that another rank counts.
            check_count(items if repeats else items or math.nan, counted=self._counted)
        factor = self.world_size * self._reference / rows.items
        if factor != 1.0:
            torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
        return rows

    def _notice(self, own_collectives: int) -> None:
        """Note how many collectives the loss or the model has started in an attempt."""
        self._own_collectives = own_collectives
        if own_collectives and not self._has_own_collectives:
            self._has_own_collectives = True
            self._news = OwnCollectives(count=own_collectives)
            # With a sharded model, all ranks recompute the same modules, so that they also repeat
            # the collectives in these together.
            if not isinstance(self._model, Sharded):
                self.why_only_retry = (
                    "the loss or the model has collectives, so all ranks must run it equally often"
                )

    def take_news(self) -> OwnCollectives | None:
        """Return an event to record, if something was noticed since the last call, or None."""
        news = self._news
        self._news = None
        return news

    def _hear(self, rows: Rows) -> None:
        """Process the stop requests and save decisions in the rows of all ranks."""
        assert self._stop is not None
        assert self._saves is not None
        self._stop.hear(rows)
        self._saves.hear(rows)

    # --- an attempt that fails on one rank

    def begin(self) -> None:
        """Start an attempt, together with the other ranks."""
        self._messages.check_here()
        self._pace.come()
        if self._messages.was_left:
            self._messages.exchange("a step after a loop was left", None)
        while True:
            self._messages.begin_step()
            self._model.begin()
            self._pace.begin()
            self._pending = None
            self._rows = None
            self._before = self._reference
            if not self._is_behind:
                return
            # The optimizer failed in the last step. The other ranks have started an attempt; let it
            # fail, so that this rank can take over the state of another one.
            obstacle = self._complete_collectives()
            if obstacle is not None:
                raise without_help(obstacle)
            self._begin_anew(_BEHIND)

    def accepts(self, attempt: StepAttempt) -> bool:
        """Return whether the attempt succeeded on all ranks. If not, all of them repeat it."""
        rows = self._rows
        assert rows is not None
        # A rank that has failed sends NaN, so the ranks ask each other only if something is wrong.
        if (attempt.facts.nonfinite or rows.failed) and self._begin_anew(_MADE):
            return False
        self._model.end()
        self._reference = rows.items / self.world_size
        self._hear(rows)
        self._pace.end(rows)
        return True

    def pay(self, found: str, parameters: Sequence[torch.Tensor]) -> None:
        """Complete the collectives that other ranks are waiting for, after an attempt failed here.

        See `OneRank.pay`.
        """
        for parameter in parameters:
            parameter.grad = None
        device = self._model.device
        release_memory([] if device.type == "cpu" else [device])
        obstacle = self._complete_collectives()
        if obstacle is not None:
            raise OutOfMemoryError(
                f"rank {self.rank} ran out of memory ({found})",
                limit=f"{obstacle}; the weights are those of the last committed step",
                fix="use a smaller batch or model, and start all ranks again.",
                rule="H401",
            )
        self._has_failed = True
        self._begin_anew(_FAILED)

    def _complete_collectives(self) -> str | None:
        """Start the collectives that the other ranks are waiting in, with NaN as input.

        Returns:
            None, or why that is not possible.
        """
        if self._rows is not None:
            return (
                "all ranks already have the gradients of this step, and the others continue with"
                " them"
            )
        obstacle: str | None = self._model.why_unpayable()
        if obstacle is not None:
            return obstacle
        try:
            return self._pay()
        except RuntimeError as error:
            cause = find_out_of_memory(error)
            if cause is None:
                raise
            return f"there was no memory to complete the collectives of the step ({cause})"

    def _pay(self) -> str | None:
        """Start the missing collectives of this attempt; return None, or why that is impossible."""
        if isinstance(self._model, Sharded):
            return self._model.follow(self._fail_row)
        obstacle: str | None = self._model.wait_for_others()
        if obstacle is not None:
            return obstacle
        has_failed_before_row = self._pending is None
        if has_failed_before_row:
            self._pending = self._begin_row(math.nan, 1.0, failed=True)
        assert self._pending is not None
        if not self._model.pay_nan() and not has_failed_before_row:
            return "its gradients were already being sent to all ranks"
        self._pending.rows()
        return None

    def _fail_row(self) -> None:
        """Send a row that says that this rank has failed, and wait for the other ranks' rows."""
        self._pending = self._begin_row(math.nan, 1.0, failed=True)
        self._pending.rows()

    def _begin_anew(self, result: int) -> bool:
        """Exchange the results of an attempt, and prepare another attempt if one rank has failed.

        Args:
            result: The result on this rank: `_MADE`, `_FAILED` or `_BEHIND`.

        Returns:
            Whether all ranks must make another attempt.
        """
        self._model.end()
        results = self._messages.exchange("attempt", result)
        if not any(results):
            return False
        self._model.reset()
        self._reference = self._before
        self._catch_up([other == _BEHIND for other in results])
        return True

    def _plan_of_failed(self, plan: StepPlan) -> StepPlan:
        """Return the plan for the next attempt, which combines those of all failed ranks."""
        plans = self._messages.exchange("plan", [self._has_failed, list(plan.recompute)])
        self._has_failed = False
        names = dict.fromkeys(name for failed, recompute in plans if failed for name in recompute)
        return replace(plan, recompute=tuple(names))

    # --- an optimizer that fails in its step

    def falls_behind(self) -> bool:
        """Note that the optimizer has run out of memory in its step on this rank.

        Returns:
            Whether this rank will receive the state of another rank, which makes up for that.
        """
        if self._model.why_not_alone is not None:
            raise without_help("each rank holds weights that no other has")
        self._is_behind = True
        return True

    def _catch_up(self, behind: list[bool]) -> None:
        """If an optimizer has failed on some rank, copy the state of another rank to all ranks.

        All ranks must call this at the same point.

        Args:
            behind: For each rank, whether its optimizer has failed in the last step.
        """
        if not any(behind):
            return
        self.spare_memory()
        source = healthy(behind)
        group = self._model.group
        device = self._model.device
        take_state(self._optimizer, source, self._messages, group, device)
        for average in self._averages:
            for tensor in average.state_dict().values():
                on_device = tensor.to(device)
                distributed.broadcast(on_device, source, group=group)
                tensor.copy_(on_device)
        self._is_behind = False

    # --- a batch in parts

    def apart(self, *, by_itself: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context for the passes over the parts of a batch; call `shared` after it.

        Args:
            by_itself: Whether only this rank splits its batch, because it ran out of memory.
        """
        self._splits_by_itself = by_itself
        unsupported = self._model.why_not_apart
        if unsupported is not None:
            raise _not_yet(unsupported)
        context: contextlib.AbstractContextManager[None] = self._model.apart()
        return context

    def check_parts(self) -> None:
        """Raise H401 if the parts of a batch contain collectives that other ranks would not match.

        See `OneRank.check_parts`.
        """
        if not self._splits_by_itself or self._is_alone or not self._tape.collectives.begun():
            return
        raise OutOfMemoryError(
            f"rank {self.rank} splits its batch, because it has run out of memory before",
            limit=(
                "each part starts collectives of the loss or the model, which the other ranks start"
                " only once"
            ),
            fix=(
                "use a smaller batch or model, or set micro_batch_size for all ranks, and start all"
                " ranks again."
            ),
            rule="H401",
        )

    def shared(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Reduce the gradients of a batch that was split; see `OneRank.shared`."""
        if self._is_alone:
            return passed
        items = 1 if added else passed.items
        weight = self._weight(passed.loss, items, counted=passed.counted)
        is_one = isinstance(weight, float) and weight == 1.0
        if not is_one:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], weight)
        # The passes have reduced nothing, so that this rank's gradients are reduced only once.
        self._model.pay_own()
        return passed

    # --- NaN and Inf

    def origin(self, find: Callable[[], Provenance], look: Callable[[], Provenance]) -> Provenance:
        """Find out on which rank NaN or Inf appeared first, and where it came from.

        Args:
            find: Replays the step on this rank, up to its first collective.
            look: Only checks the batch of this rank.
        """
        assert self._rows is not None
        suspects = self._rows.suspects()
        own = self._own_provenance(suspects, find, look)
        is_sent = own.origin is not None and own.origin.sent
        text = str(own.origin) if own.origin is not None else own.problem
        has_collectives = self._own_collectives > 0
        reports = self._messages.exchange(
            "origin", [own.origin is not None, is_sent, text, has_collectives]
        )
        return self._blamed(own, suspects, [_Report(*report) for report in reports])

    def _own_provenance(
        self, suspects: list[int], find: Callable[[], Provenance], look: Callable[[], Provenance]
    ) -> Provenance:
        """Return where NaN or Inf came from, as far as this rank can find out by itself."""
        if self._model.why_not_alone is not None:
            in_batch = look()
            if in_batch.origin is not None:
                return in_batch
            return Provenance(problem=self._model.why_not_alone)
        # This needs all ranks, which call it at the same point.
        self._model.rebuild()
        # A rank with a finite loss may still be the cause, if a collective of the loss has carried
        # its NaN to the others.
        if self.rank not in suspects and not self._own_collectives:
            return Provenance(problem="it appeared on another rank")
        with self.alone():
            return find()

    def _blamed(self, own: Provenance, suspects: list[int], reports: list[_Report]) -> Provenance:
        """Return on which rank NaN or Inf appeared first, and where it came from there.

        The first rank in this order is blamed: a suspect that has sent NaN in a collective of the
        loss, a suspect that has found an origin, any rank that has sent NaN. If there is none, the
        result names all suspects.

        Args:
            own: What this rank has found out. Only the rank itself knows the details.
            suspects: The ranks whose loss is not finite, or all ranks.
            reports: What all ranks have found out, in order of rank.
        """
        why_not_alone = self._model.why_not_alone
        if why_not_alone is not None and all(report.has_origin for report in reports):
            # Only the batches were checked. If all of them hold NaN, for example as missing labels,
            # that is not the cause.
            reports = [report._replace(has_origin=False, text=why_not_alone) for report in reports]
        senders = [rank for rank, report in enumerate(reports) if report.is_sent]
        candidates = [
            *(rank for rank in senders if rank in suspects),
            *(rank for rank in suspects if reports[rank].has_origin),
            *senders,
        ]
        if candidates:
            blamed = candidates[0]
            where = _listed([blamed])
            if blamed == self.rank:
                return replace(own, where=where)
            return Provenance(problem=reports[blamed].text, where=where)
        where = _listed(suspects)
        if any(report.has_collectives for report in reports):
            where += ", after a collective of the loss or the model"
        return Provenance(problem=reports[suspects[0]].text, where=where)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Surround a trial in which this rank runs the model without the others."""
        self._is_alone = True
        try:
            with self._model.alone():
                yield
        finally:
            self._is_alone = False

    # --- the loop

    def end_epoch(self) -> RankIsSlow | None:
        """Note that the loader has ended, and return which rank was slow; see `OneRank`."""
        rows = self._rows_of_epoch_end()
        self._hear(rows)
        self._catch_up(rows.which_failed())
        slowest = self._pace.slowest(rows)
        return slowest if self.rank == 0 else None

    def _rows_of_epoch_end(self) -> Rows:
        """Exchange the rows of all ranks at the end of an epoch.

        If steps broadcast buffers or gather shards before their row, these rows are sent through
        the store. Otherwise, if one rank ran another step instead of ending the epoch, its
        broadcast would be matched with this collective.
        """
        peak = peak_bytes(self._model.device)
        if not self._model.sends_before_row:
            self._messages.begin_step()
            self._tape.begin()
            rows = self._begin_row(0.0, peak, kind=EPOCH_END, failed=self._is_behind).rows()
            self._tape.end()
            return rows
        place = self._place()
        where = f"is at the end of epoch {place.epoch}"
        if place.passed:
            first = place.batch - place.passed
            which = (
                f"batch {first}" if place.passed == 1 else f"batches {first} to {place.batch - 1}"
            )
            where += f", where it has skipped {which} without a step"
        own = self._said(kind=EPOCH_END, failed=self._is_behind).numbers(0.0, peak)
        rows = Rows(self._messages.exchange("the end of an epoch", own, late=where))
        self._messages.begin_step()
        rows.check()
        return rows

    # --- saving

    def states(
        self,
        own: Callable[[], Mapping[str, Any]],
        trees: Callable[[], Kinds],
        constant: Callable[[], Iterable[str]],
        unsaved: Callable[[], Iterable[str]],
    ) -> dict[str, Any] | None:
        """Return the state that a checkpoint holds for each rank; see `OneRank.states`."""
        if self._messages.has_left:
            return None
        own_trees = trees()
        digests = self._digests.of(own_trees, constant())
        states = self._messages.exchange(
            "a checkpoint or close", {**own(), "behind": self._is_behind, "digests": digests}
        )
        self._catch_up([state.pop("behind") for state in states])
        names = differing_names([state.pop("digests") for state in states])
        names["buffers"] += [
            name
            for name in unsaved()
            if name in digests["buffers"] and name not in names["buffers"]
        ]
        if any(names.values()):
            # Only the first rank receives them, since it writes the checkpoint.
            differing_trees = self._messages.to_first(
                "what differs between ranks", select(own_trees, names)
            )
            for state, trees_of_rank in zip(states, differing_trees or [], strict=False):
                state.update(trees_of_rank)
        return {"reference": self._reference, "each": states, "order": self._model.order}

    def keeps_apart(self, name: str) -> bool:
        """Return whether a buffer or a frozen weight may have another value on each rank."""
        apart: bool = self._model.keeps_apart(name)
        return apart

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this rank's own state from a checkpoint, such as its random state.

        If the checkpoint was written by a different number of ranks, this rank gets a new random
        state.
        """
        saved = training.get("ranks") or {"reference": None, "each": []}
        self._reference = saved["reference"]
        states = saved["each"]
        if len(states) == self.world_size:
            self._model.lay_out(saved.get("order", []))
            own: Mapping[str, Any] = states[self.rank]
            return {**own, "position": _common_position(own["position"], states[0]["position"])}
        drawn = of_another_rank(RandomState.from_tree(training["random_state"]), self.rank)
        return {
            "random_state": drawn.to_tree(),
            "position": training["position"],
            "ladder": training["ladder"],
        }

    def chosen(
        self, choose: Callable[[], _T | None], name: Callable[[_T], str], find: Callable[[str], _T]
    ) -> _T | None:
        """Make a choice on the first rank, and return it on all ranks; see `OneRank.chosen`."""
        choice = choose() if self.rank == 0 else None
        named = self._messages.exchange("chosen", None if choice is None else name(choice))[0]
        return choice if choice is not None or named is None else find(named)

    # --- opening and leaving

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Check that facts are the same on all ranks; see `OneRank.agree`."""
        all_facts = self._messages.exchange(topic, facts())
        for name, value in all_facts[0].items():
            differing = [rank for rank, own in enumerate(all_facts) if own.get(name) != value]
            other = next(iter(differing), None)
            if other is None:
                continue
            difference = (
                f"{name} is {all_facts[other].get(name)!r:.200} on rank {other} and"
                f" {value!r:.200} on rank 0"
            )
            if name == PLACE:
                raise out_of_step(f"{difference}: one of them has skipped a batch")
            raise PolicyError(
                difference,
                limit="all ranks train one model and share one run directory",
                fix=(
                    "pass the same value on all ranks, and put the run directory where every rank"
                    " can read and write it."
                ),
                rule="H115",
            )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Surround code whose errors on one rank are raised on all ranks."""
        try:
            yield
        except BaseException as error:
            cause = self.leave(error)
            if cause is not None:
                raise cause from error
            raise

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Surround code that the first rank completes before the others start it."""
        if self.rank == 0:
            yield
        self._messages.exchange("turn", None)
        if self.rank != 0:
            yield

    def leave(self, error: BaseException) -> BaseException | None:
        """Tell the other ranks about an error that leaves the guard; see `OneRank.leave`."""
        if self._messages.has_left:
            return None
        self._model.end()
        cause = None if isinstance(error, RankError) else self._messages.lost(error)
        if (
            cause is None
            and self._saves is not None
            and self.writers is not None
            and self.writers.are_several
        ):
            self._saves.let_finish()
        self._messages.publish(cause or error)
        return cause


class _Report(NamedTuple):
    """What a rank has found out about NaN or Inf by itself."""

    has_origin: bool
    # Whether NaN or Inf went into a collective of the loss or the model.
    is_sent: bool
    # The origin, or why it is not known.
    text: str
    # Whether the loss or the model has collectives.
    has_collectives: bool


def _listed(ranks: Sequence[int]) -> str:
    """Return the ranks as a list in a sentence, such as "ranks 0 and 2"."""
    *others, last = map(str, ranks)
    if not others:
        return f"rank {last}"
    return f"ranks {', '.join(others)} and {last}"


class _Stop(StopRequest):
    """The stop request of all ranks: a request on any rank reaches all of them in the next step."""

    def __init__(self, own: StopRequest, messages: Messages) -> None:
        super().__init__()
        self._own = own
        self._messages = messages

    def said(self) -> float:
        """Return the request of this rank as a number; see `Said.stop`."""
        if self._own.signal is not None:
            return 1.0 + self._own.signal
        return 0.0 if self._own.reason is None else 1.0

    def hear(self, rows: Rows) -> None:
        """Process the requests in the rows of all ranks.

        If there are several signals, all ranks follow the one with the highest number. All ranks
        have the same reason, since a script may use it to decide what all of them do next.
        """
        rank, stop = rows.stop
        if stop > 1.0:
            self.signal = signal.Signals(int(stop) - 1)
            self.reason = self.signal.name
            self.rank = rank
        elif stop and self.reason is None:
            # The row has no room for the reason that was passed to `request_stop`.
            self.reason = self._messages.exchange("the reason to stop", self._own.reason)[rank]
            self.rank = rank

    def reset(self, *, raised: bool = False) -> None:
        """Forget a request that has ended a loop, including that of this rank itself."""
        if self.honored:
            self._own.honor()
        self._own.reset(raised=raised)
        super().reset(raised=raised)

    def __enter__(self) -> None:
        """Do nothing: with several ranks, signals interrupt nothing, because all end together."""


class _Saves:
    """Decides when all ranks save. The first rank makes the decision for all."""

    def __init__(self, own: Saving, messages: Messages, cursor: Cursor | None) -> None:
        self._own = own
        self._messages = messages
        self._cursor = cursor
        # A save is due once this step is reached; None if no save is due.
        self._due_from: int | None = None
        self._refused = False

    def said(self, kind: float) -> dict[str, bool]:
        """Return the fields of the first rank's row, for the end of a step or of an epoch."""
        steps = int(kind == STEP)
        waits = bool(steps) and self._cursor is not None and self._cursor.seems_to_end
        return {
            "save": not waits and self._own.is_due(after_steps=steps),
            "refused": self._own.has_refusal,
        }

    def hear(self, rows: Rows) -> None:
        """Process the decision in the first rank's row."""
        first = rows.each[0]
        self._refused = bool(first[Column.REFUSED])
        self._due_from = None
        if first[Column.SAVE]:
            # The row was sent before the step was counted.
            self._due_from = self._own.global_step + (first[Column.KIND] == STEP)

    def is_due(self) -> bool:
        """Return whether all ranks save at this boundary.

        They do not if the step after which they were to save was skipped.
        """
        due_from = self._due_from
        self._due_from = None
        return due_from is not None and self._own.global_step >= due_from

    def let_finish(self) -> None:
        """Wait briefly for the writers of all ranks, which stop when they learn about an error."""
        until = time.monotonic() + _WRITER_SECONDS
        while self._own.is_busy and time.monotonic() < until:
            time.sleep(0.02)

    def take_refusal(self) -> str | None:
        """Return on all ranks why a save was refused since the last call, or None."""
        if not self._refused:
            return None
        self._refused = False
        return str(self._messages.exchange("refusal", self._own.take_refusal())[0])


def _common_position(
    own: dict[str, Any] | None, first: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the position at which a rank continues in the data.

    Normally it is the rank's own position, which equals that of the first rank. It may differ in
    checkpoints from versions without the check in `Rows`, in which a single rank could skip a
    batch. All ranks then continue at the position of the first one.
    """
    if own is None or first is None:
        return own
    if own["epoch"] == first["epoch"] and own["batches"] == first["batches"]:
        return own
    return {
        **own,
        **{name: first[name] for name in ("epoch", "batches", "trained", "loader")},
        "before_last": None,
    }


def _not_yet(what: str) -> PolicyError:
    return PolicyError(
        f"{what} with several ranks",
        limit="this version does not support that with several ranks",
        fix="remove it, or run one process per run directory.",
        rule="H108",
    )
