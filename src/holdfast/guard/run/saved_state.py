"""Gather the state for a checkpoint from the objects of a run.

``saving`` writes the gathered state, and ``restoration`` loads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from holdfast.checkpoint.codec import Encoder
from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.interval import IntervalChooser
from holdfast.core.errors import PolicyError
from holdfast.core.events import run_events
from holdfast.guard.context import RunContext
from holdfast.guard.directory import RunDirectory
from holdfast.guard.optimizer_state import describe_state, state_tensors
from holdfast.guard.optimizers import SHARDED_STATE_FIX, SHARDED_STATE_LIMIT
from holdfast.guard.record import describe_error
from holdfast.guard.run.settings import RunSettings
from holdfast.guard.saving.components import gather
from holdfast.loader.random_state import RandomState, capture
from holdfast.loader.signalled import let_through
from holdfast.numerics.gradients import local


class SavedState:
    """Gathers the state of one run for a checkpoint.

    Args:
        context: The shared objects of the run.
        directory: The run directory.
        chooser: Decides when to save. The save costs that it has measured are saved too.
    """

    def __init__(
        self, context: RunContext, directory: RunDirectory, chooser: IntervalChooser
    ) -> None:
        self._context = context
        self._parts = context.parts
        self._record = context.record
        self._ranks = context.ranks
        self._cursor = context.cursor
        self._directory = directory
        self._chooser = chooser
        self.settings = RunSettings(context.parts, context.record)
        # The per-rank state for the next checkpoint. None with a single rank.
        self._of_ranks: dict[str, Any] | None = None
        # A position, and the random state to save at that position instead of the process's
        # current random state.
        self._drawn_at: tuple[tuple[int, int], RandomState] | None = None

    def position(self) -> tuple[int, int]:
        """Return the global step and the number of trained batches.

        Together, these two numbers identify a position. Every step or batch changes at least one of
        them, but the end of an epoch changes neither.
        """
        return self._record.global_step, 0 if self._cursor is None else self._cursor.trained

    def must_be_finite(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of each tensor that must be finite for the state to be saved.

        These are the trainable parameters, the optimizer state and running statistics.
        """
        names: dict[int, str] = {}
        parameter: torch.Tensor
        for name, parameter in self._parts.named_parameters():
            names[id(parameter)] = name
            if parameter.requires_grad:
                yield name, local(parameter)
        for optimizer_name, optimizer in self._parts.optimizers.items():
            for key, value in state_tensors(optimizer, names):
                yield f"{optimizer_name}: {key}", local(value)
        yield from self._context.buffers.running_statistics()

    def components(self) -> dict[str, Any]:
        """Return the state of the run, as one tree for each component of a checkpoint."""
        return gather(self._parts, self.training())

    def components_if_finite(self) -> dict[str, Any] | None:
        """Return the value of `components`, or None if the state contains NaN or Inf."""
        bad, _ = nonfinite_tensors(self.must_be_finite())
        return None if bad else self.components()

    def training(self) -> dict[str, Any]:
        """Return the guard's own state, which becomes the component "training" of a checkpoint."""
        self.settings.report_changed_groups()
        state: dict[str, Any] = {}
        if self._of_ranks is not None:
            state["ranks"] = self._of_ranks
        return state | {
            "global_step": self._record.global_step,
            "counters": asdict(self._context.counters),
            "position": None if self._cursor is None else self._cursor.state_dict(),
            "random_state": self.random_state().to_tree(),
            "ladder": self._context.ladder.state_dict(),
            "loss_scale": self._context.loss_scale.state_dict(),
            "spikes": self._context.spikes.state_dict(),
            "diagnosis": self._context.diagnosis.state_dict(),
            "save_costs": [[cost.stall_seconds, cost.seconds] for cost in self._chooser.costs],
            "run": self._directory.run_id,
            "settings": self.settings.begun_with,
            "schedules": self._context.schedules.state_dict(),
        }

    def random_state(self) -> RandomState:
        """Return the random state to save with the current position."""
        if self._drawn_at is not None and self._drawn_at[0] == self.position():
            return self._drawn_at[1]
        return (
            capture(self._parts.devices()) if self._cursor is None else self._cursor.random_state()
        )

    def reuse_random_state(self, random_state: RandomState) -> None:
        """Make saves at the current position contain this random state.

        Otherwise, they would contain the process's random state.
        """
        self._drawn_at = (self.position(), random_state)

    # --- several ranks

    def exchange(self, is_busy: Callable[[], bool]) -> bool:
        """Exchange the state that differs between ranks, for the next checkpoint.

        Args:
            is_busy: Returns whether this rank is still writing the previous checkpoint.

        Returns:
            Whether any rank is still writing the previous checkpoint. False with a single rank.

        Raises:
            PolicyError: H108 if the optimizers hold different tensors on different ranks.
        """
        self._of_ranks = self.states_of_ranks(is_busy)
        if self._of_ranks is None:
            return False
        states = self._of_ranks["each"]
        # These two values are exchanged along with the state, but are not part of the checkpoint.
        busy = [state.pop("busy") for state in states]
        forms = {state.pop("form_of_optimizers") for state in states}
        if len(forms) > 1:
            self._check_state_is_alike()
        return any(busy)

    def _check_state_is_alike(self) -> None:
        """Raise H108 on all ranks if the ranks' optimizers hold different tensors.

        The tensors must be alike because only the first rank saves the optimizer state, on behalf
        of all ranks.
        """
        optimizers = self._parts.optimizers.items()
        forms = {
            f"the state of optimizer {name!r}": describe_state(optimizer)
            for name, optimizer in optimizers
        }
        try:
            self._ranks.agree("the state of optimizers", lambda: forms)
        except PolicyError as error:
            raise PolicyError(
                error.what, limit=SHARDED_STATE_LIMIT, fix=SHARDED_STATE_FIX, rule="H108"
            ) from None

    def _of_one_rank(self, is_busy: Callable[[], bool]) -> dict[str, Any]:
        """Return the part of this rank's state that is always saved separately for each rank."""
        return {
            "random_state": self.random_state().to_tree(),
            "position": None if self._cursor is None else self._cursor.state_dict(),
            "ladder": self._context.ladder.state_dict(),
            "busy": is_busy(),
            "form_of_optimizers": zlib.crc32(
                repr(list(map(describe_state, self._parts.optimizers.values()))).encode()
            ),
        }

    def states_of_ranks(self, is_busy: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the per-rank state for a checkpoint; see `Ranks.gather_states`.

        Args:
            is_busy: Returns whether this rank is still writing the previous checkpoint.
        """
        return self._ranks.gather_states(
            lambda: self._of_one_rank(is_busy),
            self._own_trees,
            self._context.buffers.constant,
            self._unsaved_buffers,
        )

    def _unsaved_buffers(self) -> list[str]:
        """Return the names of changing buffers that are registered with ``persistent=False``.

        No ``state_dict`` contains these buffers.
        """
        changing = self._context.buffers.now()
        return [
            name
            for model_name, model in self._parts.models.items()
            for prefix, module in model.named_modules()
            for key in sorted(module._non_persistent_buffers_set)
            if (name := ".".join(part for part in (model_name, prefix, key) if part)) in changing
        ]

    def _own_trees(self) -> dict[str, dict[str, Any]]:
        """Return the buffers and ``state=`` objects that may differ between ranks."""
        return {"buffers": self._own_tensors(), "states": self._own_states()}

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """Return the buffers and frozen weights that may differ between ranks, keyed by name.

        These are buffers that are not broadcast, frozen weights that DistributedDataParallel
        ignores, and the buffers of averaged models.
        """
        keeper = self._context.buffers
        parts = self._parts
        buffers = keeper.now() | keeper.constant()
        own = {name: buffer for name, buffer in buffers.items() if self._ranks.may_differ(name)}
        for model_name, model in parts.models.items():
            frozen = {
                f"{model_name}.{key}": p
                for key, p in model.named_parameters()
                if not p.requires_grad
            }
            own |= {name: frozen[name] for name in self._ranks.ignored if name in frozen}
        # The buffers of an averaged model depend on the batches of this rank, even if the buffers
        # of the model itself are broadcast.
        for model_name, average in parts.averages.items():
            own |= {
                f"averaged.{model_name}.{key}": buffer
                for key, buffer in average.module.named_buffers()
            }
        return {name: tensor.detach() for name, tensor in own.items()}

    def _own_states(self) -> dict[str, Any]:
        """Return the states of the ``state=`` objects, keyed by name.

        Averaged models are left out, since their weights are equal on all ranks. An object whose
        state cannot be saved is left out too, and an event reports it.
        """
        averages = {id(average) for average in self._parts.averages.values()}
        own = {}
        for name, stateful in self._parts.states.items():
            if id(stateful) in averages:
                continue
            try:
                tree = stateful.state_dict()
                Encoder(f"state.{name}").encode(tree)
            except Exception as error:  # noqa: BLE001 - the user's state_dict may raise anything
                let_through(error)
                # The first rank encounters the same error when it saves, so only the others report
                # it here.
                if self._ranks.rank:
                    self._record.emit(run_events.SaveFailed(error=describe_error(error)))
            else:
                own[name] = tree
        return own

    def load_own_tensors(self, training: Mapping[str, Any]) -> None:
        """Restore the buffers and frozen weights that may differ between ranks.

        Args:
            training: The guard's own part of a saved state, with this rank's values.
        """
        saved = training.get("buffers", {})
        self._context.buffers.load(saved)
        if not saved:
            return
        for name, tensor in self._own_tensors().items():
            if name in saved:
                tensor.copy_(saved[name])

    def of_this_rank(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state of the guard, with this rank's values where the ranks differ."""
        return {**training, **self._ranks.own_state(training)}
