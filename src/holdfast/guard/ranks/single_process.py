# ruff: noqa: ARG002 - a single process needs no arguments to answer
"""`SingleProcess`: the ranks of a process that trains alone.

Its methods do nothing, or return their arguments unchanged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch

from holdfast.checkpoint.loading import all_rows
from holdfast.checkpoint.saver import Writers
from holdfast.checkpoint.tensor_files import Share
from holdfast.core.policy.policy import Policy
from holdfast.guard.cursor import Cursor
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.differing_state import EntriesByKind
from holdfast.guard.ranks.interface import Saves
from holdfast.guard.result import PassResult, Provenance, StepAttempt
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest
from holdfast.memory.ladder import StepPlan
from holdfast.numerics.gradients import GradientFacts, Group, inspect
from holdfast.numerics.loss import Terms

_T = TypeVar("_T")
_NO_CONTEXT = contextlib.nullcontext()


@final
class SingleProcess:
    """A process that trains alone; see `Ranks` for the purpose of each method."""

    rank = 0
    world_size = 1
    has_group = False
    has_left_group = False
    shards_state = False
    needs_all_gradients = False
    why_only_retry = None
    why_decide_now = None
    has_late_attempt = False
    ignored: Sequence[str] = ()

    def __init__(self) -> None:
        self.writers = Writers()

    # --- opening and leaving

    def supported_policy(self, policy: Policy) -> Policy:
        """Return `policy`: a single process supports every feature."""
        return policy

    def connect(
        self, stop: StopRequest, saving: Saving, cursor: Cursor | None
    ) -> tuple[StopRequest, Saves]:
        """Return `stop` and `saving`, since this process decides alone."""
        return stop, saving

    def open(self) -> None:
        """Do nothing: there are no other ranks to report errors to."""

    def close(self, *, in_order: bool) -> None:
        """Do nothing: there are no other ranks to wait for."""

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Do nothing: there are no other ranks to compare the facts with."""

    def choose_on_first(
        self,
        choose: Callable[[], _T | None],
        name_of: Callable[[_T], str],
        find: Callable[[str], _T],
    ) -> _T | None:
        """Return the object that `choose` returns."""
        return choose()

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return _NO_CONTEXT

    def in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return _NO_CONTEXT

    def announce_failure(self, error: BaseException) -> BaseException | None:
        """Return None: no other rank has caused the error."""
        return None

    # --- a step

    def begin_attempt(self, optimizers: Sequence[str]) -> None:
        """Do nothing: there are no other ranks to synchronize with."""

    def loss_of_late_attempt(self) -> torch.Tensor:
        """Return NaN, since there are no other ranks that have computed their loss."""
        return torch.tensor(math.nan)

    def begin_late_attempt(self, optimizers: Sequence[str]) -> bool:
        """Return True, since a single process can always make an attempt."""
        return True

    def weighted_loss(self, terms: Terms) -> torch.Tensor:
        """Return the total loss without a weight, since there are no other ranks."""
        return terms.total()

    def check_terms(self, terms: Terms) -> None:
        """Do nothing: a single process can average any terms."""

    def combine(self, passed: PassResult, parameters: Sequence[torch.Tensor]) -> PassResult:
        """Return `passed` unchanged, since there are no other results."""
        return passed

    def inspect_gradients(
        self, groups: Sequence[Group], loss: torch.Tensor, items: torch.Tensor | None
    ) -> tuple[GradientFacts, torch.Tensor]:
        """Measure the gradients, none of which are sharded."""
        return inspect(groups, loss, items)

    def accepts(self, attempt: StepAttempt) -> bool:
        """Return True: no other rank can have failed."""
        return True

    def complete_collectives(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """Do nothing: no other rank is waiting in a collective."""

    def plan_of_next_attempt(self, plan: StepPlan) -> StepPlan:
        """Return `plan` unchanged, since there are no other plans."""
        return plan

    def take_event(self) -> None:
        """Return None: events about collectives need several ranks."""
        return

    def request_optimizer_state(self) -> bool:
        """Return False: no other rank holds the weights and moments."""
        return False

    def find_origin(
        self, replay: Callable[[], Provenance], check_batch: Callable[[], Provenance]
    ) -> Provenance:
        """Return the origin that a replay of the step finds."""
        return replay()

    # --- a step that is decided late

    def combine_without_reading(
        self, passed: PassResult, parameters: Sequence[torch.Tensor]
    ) -> PassResult:
        """Return `passed` unchanged, since there are no other results."""
        return passed

    def end_late_attempt(self) -> None:
        """Do nothing: there are no results of other ranks to read."""

    def end_failed_late_attempt(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """Do nothing: no other rank is waiting in a collective."""

    def receive_stops_and_saves(self, *, is_next_attempted: bool) -> None:
        """Do nothing: there are no other ranks that decide anything."""

    def agree_on_failure(self, *, has_failed: bool) -> bool:
        """Return `has_failed`, since no other rank can have failed."""
        return has_failed

    # --- a batch that is split, or a model that one rank runs alone

    def no_sync(self, *, only_this_rank: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return _NO_CONTEXT

    def check_parts(self) -> None:
        """Do nothing: no collectives involve other ranks."""

    def reduce_gradients(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Return `passed` unchanged, since there are no other ranks."""
        return passed

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return _NO_CONTEXT

    # --- the loop and saving

    def end_epoch(self) -> None:
        """Return None: there is no slow rank to wait for."""
        return

    def gather_states(
        self,
        own: Callable[[], Mapping[str, Any]],
        trees: Callable[[], EntriesByKind],
        constant: Callable[[], Iterable[str]],
        unsaved: Callable[[], Iterable[str]],
    ) -> None:
        """Return None: there is no state to save separately for each rank."""
        return

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `training`, which holds this process's own state."""
        return training

    def may_differ(self, name: str) -> bool:
        """Return False: there is no other rank to differ from."""
        return False

    def part_to_save(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Return `trees`: a single process saves the state of all components."""
        return trees

    def rows_to_load(
        self,
        parts: Parts,
    ) -> Callable[[str, str, torch.Size], Share | None]:
        """Return `all_rows`: a single process needs whole tensors."""
        return all_rows
