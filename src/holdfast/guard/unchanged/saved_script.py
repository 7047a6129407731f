"""What a checkpoint holds about the script: its loops, its position and its variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.store import Entry, Store
from holdfast.guard.repeated_steps import lost_steps
from holdfast.guard.unchanged.variables.kinds import Saved, SavedVariables
from holdfast.loader.random_state import RandomState

# The name under which the guard saves the script, and the component of a checkpoint that holds it.
STATE_NAME = "script"
_COMPONENT = f"state.{STATE_NAME}"
# A resumed script repeats at least this many recorded steps, if a checkpoint is old enough.
LEAST_REPEATED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLoop:
    """An outermost loop over a loader that has ended."""

    # The file and line of the loop, as in `LoopPlace.name`, and its function.
    place_name: str
    function: str
    # The values of the targets of all enclosing ``for`` statements when the loop began, such as the
    # epoch.
    enclosing_targets: dict[str, Any]
    # The variables of the script after the loop. None if the loop must be run again, because it is
    # not a `for` statement, or was left in another way than by exhaustion or `break`.
    variables: SavedVariables | None
    # The random state after the loop. The code that follows may draw from it, for example to choose
    # the samples of the next epoch.
    random_state: RandomState

    def to_tree(self) -> dict[str, Any]:
        """Return the loop in a form that a checkpoint can store."""
        return {
            "place": self.place_name,
            "function": self.function,
            "enclosing": self.enclosing_targets,
            "variables": self.variables,
            "random_state": self.random_state.to_tree(),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> FinishedLoop:
        """Return the object from which `to_tree` has made a tree."""
        return cls(
            place_name=tree["place"],
            function=tree["function"],
            enclosing_targets=tree["enclosing"],
            variables=tree["variables"],
            random_state=RandomState.from_tree(tree["random_state"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStart:
    """The state of a loader and of the random generators when a loop began."""

    random_state: RandomState
    # The states of the loader's random generators and of its samplers with a ``state_dict``.
    generators: list[Any]
    # The attributes of its other samplers.
    samplers: list[Saved]
    # Whether persistent workers were running. None if the loader has none.
    had_workers: bool | None

    def to_tree(self) -> dict[str, Any]:
        """Return the state in a form that a checkpoint can store."""
        return {
            "random_state": self.random_state.to_tree(),
            "generators": self.generators,
            "samplers": self.samplers,
            "had_workers": self.had_workers,
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> LoaderStart:
        """Return the object from which `to_tree` has made a tree."""
        return cls(
            random_state=RandomState.from_tree(tree["random_state"]),
            generators=tree["generators"],
            samplers=tree["samplers"],
            had_workers=tree["had_workers"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentLoop:
    """The position in the loop that is running."""

    # The place and the enclosing targets, as in `FinishedLoop`.
    place_name: str
    function: str
    enclosing_targets: dict[str, Any]
    start: LoaderStart
    # The number of batches that the loop has processed.
    batch_count: int
    # The random state before the last of these batches was fetched.
    state_before_last_batch: RandomState | None

    def to_tree(self) -> dict[str, Any]:
        """Return the position in a form that a checkpoint can store."""
        before_last = self.state_before_last_batch
        return {
            "place": self.place_name,
            "function": self.function,
            "enclosing": self.enclosing_targets,
            "start": self.start.to_tree(),
            "batches": self.batch_count,
            "before_last": None if before_last is None else before_last.to_tree(),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> CurrentLoop:
        """Return the object from which `to_tree` has made a tree."""
        before_last = tree["before_last"]
        return cls(
            place_name=tree["place"],
            function=tree["function"],
            enclosing_targets=tree["enclosing"],
            start=LoaderStart.from_tree(tree["start"]),
            batch_count=tree["batches"],
            state_before_last_batch=(
                None if before_last is None else RandomState.from_tree(before_last)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedScript:
    """The state of the script at one boundary."""

    # The command line of the process. The command may start others, which are not resumed.
    argv: list[str]
    finished_loops: list[FinishedLoop]
    # None between two loops.
    current_loop: CurrentLoop | None
    # The values of the `enumerate` counters around the current loop or, between two loops, around
    # the last one.
    enumerate_counters: list[int]
    variables: SavedVariables
    random_state: RandomState
    # The global step of the checkpoint. It is not part of the tree, because the checkpoint has it.
    global_step: int = field(default=0)

    def to_tree(self) -> dict[str, Any]:
        """Return the state in a form that a checkpoint can store."""
        return {
            "argv": self.argv,
            "finished": [loop.to_tree() for loop in self.finished_loops],
            "current": None if self.current_loop is None else self.current_loop.to_tree(),
            "counters": self.enumerate_counters,
            "variables": self.variables,
            "random_state": self.random_state.to_tree(),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], global_step: int) -> SavedScript:
        """Return the object from which `to_tree` has made a tree."""
        current = tree["current"]
        return cls(
            argv=tree["argv"],
            finished_loops=[FinishedLoop.from_tree(loop) for loop in tree["finished"]],
            current_loop=None if current is None else CurrentLoop.from_tree(current),
            enumerate_counters=tree["counters"],
            variables=tree["variables"],
            random_state=RandomState.from_tree(tree["random_state"]),
            global_step=global_step,
        )


def load_saved_script(run_dir: Path) -> SavedScript | None:
    """Return the state of the script in the checkpoint from which the run resumes.

    The run resumes from the newest good checkpoint after which the earlier attempt has recorded at
    least `LEAST_REPEATED_STEPS` steps, so that the resume can be proven. If there is no such
    checkpoint, it resumes from the newest one.

    Args:
        run_dir: The run directory of the guard.

    Returns:
        The state, or None if the run has no checkpoint.

    Raises:
        HoldfastError: H312 or H307 if no checkpoint can be read.
    """
    store = Store(run_dir / "checkpoints")
    newest = store.newest_good()
    if newest is None:
        return None
    entry = _entry_with_steps_to_repeat(store, newest, run_dir / "recorder" / "rank0") or newest
    trees = read_components(entry, [_COMPONENT])
    return SavedScript.from_tree(trees[_COMPONENT], entry.global_step)


def _entry_with_steps_to_repeat(store: Store, newest: Entry, recording: Path) -> Entry | None:
    """Return the newest good checkpoint after which enough steps are recorded, or None."""
    candidate: Entry | None = newest
    while candidate is not None:
        if len(lost_steps(recording, candidate.global_step)) >= LEAST_REPEATED_STEPS:
            return candidate
        candidate = store.newest_good(before_step=candidate.global_step - 1)
    return None
