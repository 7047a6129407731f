"""What a checkpoint holds about the script: its loops, its position and its variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.store import Entry, Store
from holdfast.guard.repeated_steps import lost_steps
from holdfast.guard.unchanged.variable_kinds import Saved
from holdfast.loader.random_state import RandomState

# The name under which the guard saves the script, and the component of a checkpoint that holds it.
STATE_NAME = "script"
_COMPONENT = f"state.{STATE_NAME}"
# A resumed script repeats at least this many recorded steps, if a checkpoint is old enough.
LEAST_REPEATED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLoop:
    """An outermost loop over a loader that has ended."""

    # The file and line of the loop, and its function.
    place: str
    function: str
    # The targets of the enclosing ``for`` statements when the loop began, such as the epoch.
    enclosing: dict[str, Any]
    # The variables of the script after the loop. None if the loop must be run again, because it is
    # not a `for` statement, or was left in another way than by exhaustion or `break`.
    variables: dict[str, dict[str, Saved]] | None
    # The random state after the loop. The code that follows may draw from it, for example to choose
    # the samples of the next epoch.
    random_state: RandomState

    def to_tree(self) -> dict[str, Any]:
        """Return the loop in a form that a checkpoint can store."""
        return {
            "place": self.place,
            "function": self.function,
            "enclosing": self.enclosing,
            "variables": self.variables,
            "random_state": self.random_state.to_tree(),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> FinishedLoop:
        """Convert the result of `to_tree` back."""
        return cls(
            place=tree["place"],
            function=tree["function"],
            enclosing=tree["enclosing"],
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

    place: str
    function: str
    enclosing: dict[str, Any]
    start: LoaderStart
    # The number of batches that the loop has processed.
    batches: int
    # The random state before the last of these batches was fetched.
    before_last: RandomState | None

    def to_tree(self) -> dict[str, Any]:
        """Return the position in a form that a checkpoint can store."""
        return {
            "place": self.place,
            "function": self.function,
            "enclosing": self.enclosing,
            "start": self.start.to_tree(),
            "batches": self.batches,
            "before_last": None if self.before_last is None else self.before_last.to_tree(),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> CurrentLoop:
        """Return the object from which `to_tree` has made a tree."""
        before_last = tree["before_last"]
        return cls(
            place=tree["place"],
            function=tree["function"],
            enclosing=tree["enclosing"],
            start=LoaderStart.from_tree(tree["start"]),
            batches=tree["batches"],
            before_last=None if before_last is None else RandomState.from_tree(before_last),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedScript:
    """The state of the script at one boundary."""

    # The command line of the process. The command may start others, which are not resumed.
    argv: list[str]
    finished: list[FinishedLoop]
    # None between two loops.
    current: CurrentLoop | None
    # The counters of the `enumerate` objects around the current or the last loop.
    counters: list[int]
    variables: dict[str, dict[str, Saved]]
    random_state: RandomState
    # The global step of the checkpoint. It is not part of the tree, because the checkpoint has it.
    global_step: int = field(default=0)

    def to_tree(self) -> dict[str, Any]:
        """Return the state in a form that a checkpoint can store."""
        return {
            "argv": self.argv,
            "finished": [loop.to_tree() for loop in self.finished],
            "current": None if self.current is None else self.current.to_tree(),
            "counters": self.counters,
            "variables": self.variables,
            "random_state": self.random_state.to_tree(),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], global_step: int) -> SavedScript:
        """Return the object from which `to_tree` has made a tree."""
        current = tree["current"]
        return cls(
            argv=tree["argv"],
            finished=[FinishedLoop.from_tree(loop) for loop in tree["finished"]],
            current=None if current is None else CurrentLoop.from_tree(current),
            counters=tree["counters"],
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
