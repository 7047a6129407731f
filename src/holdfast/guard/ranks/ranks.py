"""Several ranks that train one model.

Each step is the same on all of them, and so is what follows from it.

Undisturbed, one small gather beside backward is all that is added. A rank that runs out of memory
begins what the others wait for by itself, in NaN, and all make the step again. One that fails
otherwise says why, and all end.
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
from holdfast.guard.ranks.row import EPOCH_END, STEP, PendingRow, Place, Rows, Said
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
_WRITER_SECONDS = 2.0
# How an attempt has gone on a rank; the last: it has not even stepped before
_MADE, _FAILED, _BEHIND = range(3)
_REFUSED = {"drop_nonfinite_samples": (False,)}  # with what is fine


class Ranks(OneRank):
    """The ranks of a process group, seen from one of them."""

    def __init__(
        self, model: Replicated | Sharded, optimizer: Optimizer, averages: Iterable[nn.Module] = ()
    ) -> None:
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self._model: Any = model  # some things only a replicated one is asked for
        self._optimizer, self._averages, self.norms = optimizer, list(averages), model.norms
        self._has_failed = False  # in the last attempt
        self._is_behind = False  # the optimizer has failed half-way, and the others have stepped
        self._messages = Messages(self.rank, self.world_size)
        watch_arrival(model.group, self._messages)
        self.open, self.close = self._messages.open, self._messages.close
        self.shares, self.ignored = model.shares, model.ignored
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
        self._rows: Rows | None = None  # of the last step
        # Items of a rank that a loss is measured by; the same on all
        self._reference: float | None = None
        self._before: float | None = None  # as that, before this step
        self._counted = False  # the items of this step must be whole
        self._is_alone = False
        self._splits_by_itself = False  # since its memory was short
        # Of the loss or the model, in the newest attempt that all have made
        self._own_collectives = 0
        self._has_own_collectives = False  # in any
        self._news: OwnCollectives | None = None
        self._stop: _Stop | None = None
        self._saves: _Saves | None = None
        self._cursor: Cursor | None = None

    @property
    def has_parted(self) -> bool:
        """Return whether the others do not wait for this rank any more, and need not answer it."""
        return self._messages.has_left or self._messages.has_parted

    def policy(self, policy: Policy) -> Policy:
        """Return the policy as far as it can be kept.

        Raise H108 for what was asked for and cannot.
        """
        for name, fine in {**_REFUSED, **self._model.refused}.items():
            if getattr(policy, name) not in fine:
                raise _not_yet(f"{name}={getattr(policy, name)!r}")
        self._model.scales = policy.precision == "fp16"
        return replace(
            policy,
            forecast_micro_batch_size=None,
            snapshot_interval_steps=None,
            **self._model.unobserved,
        )  # what a rank would do by itself is not done

    def agreed(
        self, stop: StopRequest, saving: Saving, cursor: Cursor | None
    ) -> tuple[StopRequest, Saves]:
        """Return what all ranks follow: what was said in the last step."""
        self._cursor = cursor
        self._stop = _Stop(stop, self._messages)
        self._saves = _Saves(saving, self._messages, cursor)
        return self._stop, self._saves

    # --- a step

    def weighed(self, terms: Terms) -> torch.Tensor:
        """Return the loss to run backward from: all ranks' gradients then add up by their items."""
        loss, items = terms.total(), terms.items[0]
        if self._is_alone:
            return loss
        self.check_terms(terms)
        weight = self._weight(loss.detach(), items, counted=terms.counted)
        return loss if isinstance(weight, float) and weight == 1.0 else loss * weight

    def check_terms(self, terms: Terms) -> None:
        """Raise H203 for a loss of several means: ranks weigh it by one number of items."""
        if len(terms.means) > 1:
            raise BatchError(
                f"loss_fn returned {len(terms.means)} terms",
                limit="with several ranks a loss is one mean over its items",
                fix="return one Loss, or the bare sum of the means.",
                rule="H203",
            )

    def _weight(self, loss: torch.Tensor, items: Any, *, counted: bool) -> Any:
        """Tell the others of the loss of this rank, and return what its gradient weighs."""
        repeats = self._cursor is not None and self._cursor.repeats()
        if repeats:
            items = 0.0
        self._pending, self._counted = (
            self._begin_row(loss, items, repeats=repeats, **self._pace.said()),
            counted,
        )
        return items / self._reference_for(items)

    def _begin_row(self, loss: Any, items: Any, **said: Any) -> PendingRow:
        self._messages.check_here()
        row = self._said(**said)
        self._model.row_begins()
        pending = PendingRow(row, loss, items, self._model.device, self._model.group)
        self._model.row_begun()
        return pending

    def _said(self, **said: Any) -> Said:
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
        """Return where this rank is in its data.

        Steps outside of our loop are all made at one place.
        """
        cursor = self._cursor
        return Place() if cursor is None else Place(cursor.epoch, cursor.batches, cursor.passed)

    def _reference_for(self, items: Any) -> float:
        """Return what the items of each rank are measured by.

        Those of the last step, or now equal ones.

        Equal items need no weight, so their bits are those of a bare loop. A rank with other items
        than last time waits for what the others have; where none has others, nobody has to look.
        """
        assert self._pending is not None
        known = self._reference
        if known is None or (isinstance(items, (int, float)) and items != known):
            rows = self._pending.rows()
            if rows.failed:
                return float(items)  # nothing comes of this attempt
            if known is None or len({row[2] for row in rows.each}) == 1:
                self._reference = known = rows.items / self.world_size
        return known

    def gathered(self, parameters: Sequence[torch.Tensor]) -> Rows:
        """Correct the gradients by the items of all ranks and return what they said."""
        assert self._pending is not None
        self._rows = rows = self._pending.rows()
        if rows.failed:
            return rows
        self._notice(self._model.own_collectives())
        assert self._reference is not None
        for row in rows.each:
            check_count(row[2] if row[7] else row[2] or math.nan, counted=self._counted)
        factor = self.world_size * self._reference / rows.items
        if factor != 1.0:
            torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
        return rows

    def _notice(self, own_collectives: int) -> None:
        self._own_collectives = own_collectives
        if own_collectives and not self._has_own_collectives:
            self._has_own_collectives = True
            self._news = OwnCollectives(count=own_collectives)
            if not isinstance(self._model, Sharded):  # of which all ranks recompute the same
                self.why_only_retry = (
                    "the loss or the model talks to the other ranks, as often as they do"
                )

    def take_news(self) -> OwnCollectives | None:
        """Return what this rank has noticed in a step since this was last asked, or None."""
        news, self._news = self._news, None
        return news

    def _hear(self, rows: Rows) -> None:
        assert self._stop is not None
        assert self._saves is not None
        self._stop.hear(rows)
        self._saves.hear(rows)

    # --- an attempt that one rank cannot make
    # -----------------------------------------------------------------

    def begin(self) -> None:
        """Begin an attempt, on all ranks."""
        self._messages.check_here()
        self._pace.come()
        if self._messages.was_left:
            self._messages.exchange("a step after a loop was left", None)
        while True:
            self._messages.begin_step()
            self._model.begin()
            self._pace.begin()
            self._pending, self._rows, self._before = None, None, self._reference
            if not self._is_behind:
                return
            if (hindered := self._unpaid()) is not None:
                raise without_help(hindered)
            self._begin_anew(_BEHIND)

    def accepts(self, attempt: StepAttempt) -> bool:
        """Say whether all ranks have made an attempt; False: one could not, and all begin anew."""
        rows = self._rows
        assert rows is not None
        if (attempt.facts.nonfinite or rows.failed) and self._begin_anew(_MADE):
            return False
        self._model.end()
        self._reference = rows.items / self.world_size
        self._hear(rows)
        self._pace.end(rows)
        return True

    def pay(self, found: str, parameters: Sequence[torch.Tensor]) -> None:
        """Begin what the others still wait for, in NaN, and let all of them begin anew.

        H401 if that cannot be.
        """
        for parameter in parameters:
            parameter.grad = None
        device = self._model.device
        release_memory([] if device.type == "cpu" else [device])
        hindered = self._unpaid()
        if hindered is not None:
            raise OutOfMemoryError(
                f"rank {self.rank} ran out of memory ({found})",
                limit=f"{hindered}; the weights are those of the last step",
                fix="use a smaller batch or model, and start all ranks again.",
                rule="H401",
            )
        self._has_failed = True
        self._begin_anew(_FAILED)

    def _unpaid(self) -> str | None:
        """Begin what the others wait for, in NaN; return what is in the way, or None."""
        if self._rows is not None:
            return (
                "all ranks have the gradients of this step already, and the others go on with them"
            )
        why: str | None = self._model.why_unpayable()
        if why is not None:
            return why
        try:
            return self._pay()
        except RuntimeError as error:
            if (found := find_out_of_memory(error)) is None:
                raise
            return f"memory for what the other ranks wait for was refused too ({found})"

    def _pay(self) -> str | None:
        if isinstance(self._model, Sharded):
            return self._model.follow(self._fail_row)
        hindered: str | None = self._model.wait_for_others()
        if hindered is not None:
            return hindered
        failed = self._pending is None
        if failed:
            self._pending = self._begin_row(math.nan, 1.0, failed=True)
        assert self._pending is not None
        if not self._model.pay_nan() and not failed:
            return "its gradients were on their way to all ranks already"
        self._pending.rows()
        return None

    def _fail_row(self) -> None:
        self._pending = self._begin_row(math.nan, 1.0, failed=True)
        self._pending.rows()

    def _begin_anew(self, said: int) -> bool:
        """Tell the others how an attempt has gone here; return whether all of them make another."""
        self._model.end()
        found = self._messages.exchange("attempt", said)
        if not any(found):
            return False
        self._model.reset()
        self._reference = self._before
        self._catch_up([each == _BEHIND for each in found])
        return True

    def _plan_of_failed(self, plan: StepPlan) -> StepPlan:
        """Return the plan by which all make a step again.

        What those recompute who could not make it.
        """
        plans = self._messages.exchange("plan", [self._has_failed, list(plan.recompute)])
        self._has_failed = False
        names = dict.fromkeys(name for failed, recompute in plans if failed for name in recompute)
        return replace(plan, recompute=tuple(names))

    # --- an optimizer that fails half-way
    # ---------------------------------------------------------------------

    def falls_behind(self) -> bool:
        """Note that the optimizer has failed half-way.

        Return whether the state of another rank will be taken.
        """
        if self._model.why_not_alone is not None:
            raise without_help("each rank holds weights that no other has")
        self._is_behind = True
        return True

    def _catch_up(self, behind: list[bool]) -> None:
        """Take the state of a rank that has stepped, where one has not.

        All of them do so at the same place.
        """
        if any(behind):
            self.spare_memory()
            source, group, device = healthy(behind), self._model.group, self._model.device
            take_state(self._optimizer, source, self._messages, group, device)
            for tensor in (
                tensor for average in self._averages for tensor in average.state_dict().values()
            ):
                distributed.broadcast(there := tensor.to(device), source, group=group)
                tensor.copy_(there)
            self._is_behind = False

    # --- a batch in parts

    def apart(self, *, by_itself: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the parts of a batch are run; `shared` follows.

        `by_itself`: this rank cuts its batch since its memory was short, and not because the policy
        says so.
        """
        self._splits_by_itself = by_itself
        if (what := self._model.why_not_apart) is not None:
            raise _not_yet(what)
        context: contextlib.AbstractContextManager[None] = self._model.apart()
        return context

    def check_parts(self) -> None:
        """Raise H401 between the parts of a batch if they talk to ranks that may make fewer
        parts.
        """
        if not self._splits_by_itself or self._is_alone or not self._tape.collectives.begun():
            return
        raise OutOfMemoryError(
            f"rank {self.rank} makes its batch in parts, since it has run out of memory before",
            limit=(
                "each part begins collectives of the loss or the model, which the other ranks begin"
                " once"
            ),
            fix=(
                "use a smaller batch or model, or set micro_batch_size for all ranks, and start all"
                " of them again."
            ),
            rule="H401",
        )

    def shared(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Reduce the gradients of a batch that was run in parts.

        They count by its items, or alike if `added`.
        """
        if self._is_alone:
            return passed
        weight = self._weight(passed.loss, 1 if added else passed.items, counted=passed.counted)
        if not (isinstance(weight, float) and weight == 1.0):
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], weight)
        self._model.pay_own()
        return passed

    # --- NaN and Inf

    def origin(self, find: Callable[[], Provenance], look: Callable[[], Provenance]) -> Provenance:
        """Find out on which rank NaN or Inf came up, and there where it came from.

        `find` makes the step again on this rank up to its first collective, and `look` only looks
        at its batch.
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
        """Return what this rank finds out by itself."""
        if self._model.why_not_alone is not None:
            in_batch = look()
            if in_batch.origin is not None:
                return in_batch
            return Provenance(problem=self._model.why_not_alone)
        self._model.rebuild()  # on all ranks
        # A collective of the loss may have carried NaN from a rank whose own loss is finite to the
        # others.
        if self.rank not in suspects and not self._own_collectives:
            return Provenance(problem="it came up on another rank")
        with self.alone():
            return find()

    def _blamed(self, own: Provenance, suspects: list[int], reports: list[_Report]) -> Provenance:
        """Return where it came up. Only the rank that has found the origin has its details."""
        why_not_alone = self._model.why_not_alone
        if why_not_alone is not None and all(report.has_origin for report in reports):
            # Batches were only looked at, and NaN in each of them, such as a missing label, is
            # nobody's fault.
            reports = [report._replace(has_origin=False, text=why_not_alone) for report in reports]
        sent = [rank for rank, report in enumerate(reports) if report.is_sent]
        likely = [rank for rank in suspects if reports[rank].has_origin]
        ranked = [*(rank for rank in sent if rank in suspects), *likely, *sent]
        if ranked:
            where = _listed(ranked[:1])
            if ranked[0] == self.rank:
                return replace(own, where=where)
            return Provenance(problem=reports[ranked[0]].text, where=where)
        where = _listed(suspects)
        if any(report.has_collectives for report in reports):
            where += ", after a collective of the loss or the model"
        return Provenance(problem=reports[suspects[0]].text, where=where)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank try something out by itself."""
        self._is_alone = True
        try:
            with self._model.alone():
                yield
        finally:
            self._is_alone = False

    # --- the loop

    def end_epoch(self) -> RankIsSlow | None:
        """Return which rank was slow.

        Raise H116 if the loader of one has ended and that of another has not.
        """
        rows = self._rows_of_epoch_end()
        self._hear(rows)
        self._catch_up(rows.which_failed())
        slowest = self._pace.slowest(rows)
        return slowest if self.rank == 0 else None

    def _rows_of_epoch_end(self) -> Rows:
        """Return the rows of all ranks at the end of an epoch.

        A rank that makes another step instead begins other collectives before its row, where
        buffers or shards of weights are sent. The rows then go through the store: among these
        collectives they would be taken for one.
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
            where += f", where it has skipped {which}, without a step"
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
        """Return what a checkpoint holds of each rank, besides what is the same on all.

        See `OneRank.states`.
        """
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
        """Return whether a buffer, or a frozen weight, of this name may have a value of its own
        on each rank.
        """
        apart: bool = self._model.keeps_apart(name)
        return apart

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a checkpoint holds of this rank.

        Its random state and what else may differ between ranks.
        """
        saved = training.get("ranks") or {"reference": None, "each": []}
        self._reference, each = saved["reference"], saved["each"]
        if len(each) == self.world_size:
            self._model.lay_out(saved.get("order", []))
            own: Mapping[str, Any] = each[self.rank]
            return {**own, "position": _common_position(own["position"], each[0]["position"])}
        drawn = of_another_rank(RandomState.from_tree(training["random_state"]), self.rank)
        return {
            "random_state": drawn.to_tree(),
            "position": training["position"],
            "ladder": training["ladder"],
        }

    def chosen(
        self, choose: Callable[[], _T | None], name: Callable[[_T], str], find: Callable[[str], _T]
    ) -> _T | None:
        """Return what the first rank chooses; the others find it by its name."""
        choice = choose() if self.rank == 0 else None
        named = self._messages.exchange("chosen", None if choice is None else name(choice))[0]
        return choice if choice is not None or named is None else find(named)

    # --- opening and leaving

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Raise H115 on all ranks if a fact differs between them, H116 if it is their `PLACE` in
        the data.
        """
        all_facts = self._messages.exchange(topic, facts())
        for name, value in all_facts[0].items():
            other = next(
                (rank for rank, each in enumerate(all_facts) if each.get(name) != value), None
            )
            if other is None:
                continue
            what = (
                f"{name} of rank {other} is {all_facts[other].get(name)!r:.200} and of rank 0"
                f" {value!r:.200}"
            )
            if name == PLACE:
                raise out_of_step(f"{what}: one of them has passed a batch without a step")
            raise PolicyError(
                what,
                limit="all ranks train one model in one run directory, which they share",
                fix=(
                    "give all ranks the same; put the run directory where every rank reads and"
                    " writes it."
                ),
                rule="H115",
            )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let an error on one rank end all of them."""
        try:
            yield
        except BaseException as error:
            behind = self.leave(error)
            if behind is not None:
                raise behind from error
            raise

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the first rank pass the context before the others enter it."""
        if self.rank == 0:
            yield
        self._messages.exchange("turn", None)
        if self.rank != 0:
            yield

    def leave(self, error: BaseException) -> BaseException | None:
        """Tell the others of an error that leaves the guard.

        Return that of another rank, if that is behind it.
        """
        if self._messages.has_left:
            return None
        self._model.end()
        behind = None if isinstance(error, RankError) else self._messages.lost(error)
        if (
            behind is None
            and self._saves is not None
            and self.writers is not None
            and self.writers.are_several
        ):
            self._saves.let_finish()
        self._messages.publish(behind or error)
        return behind


class _Report(NamedTuple):
    """What a rank has found out about NaN or Inf by itself."""

    has_origin: bool
    is_sent: bool  # it went into a collective of the loss or the model
    text: str
    has_collectives: bool  # the loss or the model has some


def _listed(ranks: Sequence[int]) -> str:
    """Return the ranks as people list them."""
    *others, last = map(str, ranks)
    if not others:
        return f"rank {last}"
    return f"ranks {', '.join(others)} and {last}"


class _Stop(StopRequest):
    """The request that all ranks follow: any rank is asked, and all hear of it in the next step."""

    def __init__(self, own: StopRequest, messages: Messages) -> None:
        super().__init__()
        self._own = own
        self._messages = messages

    def said(self) -> float:
        """Return what this rank says of its own request, see `Said.stop`."""
        if self._own.signal is not None:
            return 1.0 + self._own.signal
        return 0.0 if self._own.reason is None else 1.0

    def hear(self, rows: Rows) -> None:
        """Take in what all have said.

        Of several signals, all ranks follow the one with the highest number.

        The reason is the same on all ranks, since a script may decide by it what all of them do
        next.
        """
        rank, stop = rows.stop
        if stop > 1.0:
            self.signal = signal.Signals(int(stop) - 1)
            self.reason = self.signal.name
            self.rank = rank
        elif stop and self.reason is None:
            # The row has no room for the text of a call, which only the rank that was asked knows.
            self.reason = self._messages.exchange("the reason to stop", self._own.reason)[rank]
            self.rank = rank

    def reset(self, *, raised: bool = False) -> None:
        """Forget a request that has ended a loop, here and where it was made."""
        self._own.honoured = self.honoured
        self._own.reset(raised=raised)
        super().reset(raised=raised)

    def __enter__(self) -> None:
        """Do not let a signal interrupt anything: all end together."""


class _Saves:
    """The saves that all make: what the first rank has said, and each of it once."""

    def __init__(self, own: Saving, messages: Messages, cursor: Cursor | None) -> None:
        self._own, self._messages, self._cursor = own, messages, cursor
        self._due_from: int | None = None  # this step
        self._refused = False

    def said(self, kind: float) -> dict[str, bool]:
        """Return what the first rank says of its own saves, at the end of a step or an epoch."""
        steps = int(kind == STEP)
        waits = bool(steps) and self._cursor is not None and self._cursor.seems_to_end
        return {
            "save": not waits and self._own.is_due(after_steps=steps),
            "refused": self._own.has_refusal,
        }

    def hear(self, rows: Rows) -> None:
        """Take in what the first rank has said."""
        first = rows.each[0]
        self._refused = bool(first[6])
        self._due_from = self._own.global_step + (first[0] == STEP) if first[5] else None

    def is_due(self) -> bool:
        """Return whether all save at this boundary.

        Not if the step that was to be saved was skipped.
        """
        due, self._due_from = self._due_from, None
        return due is not None and self._own.global_step >= due

    def let_finish(self) -> None:
        """Give the writers of all ranks a moment.

        When the others hear of an error, they give up.
        """
        until = time.monotonic() + _WRITER_SECONDS
        while self._own.is_busy and time.monotonic() < until:
            time.sleep(0.02)

    def take_refusal(self) -> str | None:
        """Return why a save was refused, once and to all, or None."""
        refused, self._refused = self._refused, False
        return (
            str(self._messages.exchange("refusal", self._own.take_refusal())[0])
            if refused
            else None
        )


def _common_position(
    own: dict[str, Any] | None, first: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return where a rank goes on in the data.

    At its own place, if that is also the place of the first rank.

    It is another one where a rank has passed a batch alone, which versions before the check in
    `Rows` let happen. Then all go on from the place of the first one.
    """
    if (
        own is None
        or first is None
        or all(own[name] == first[name] for name in ("epoch", "batches"))
    ):
        return own
    return {
        **own,
        **{name: first[name] for name in ("epoch", "batches", "trained", "loader")},
        "before_last": None,
    }


def _not_yet(what: str) -> PolicyError:
    return PolicyError(
        f"{what} with several ranks",
        limit="this version does not let ranks agree about that",
        fix="leave it out, or run one process per run directory.",
        rule="H108",
    )
