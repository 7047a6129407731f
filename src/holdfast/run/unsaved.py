"""What has changed since the last save although no step was made, so that the position does not show it.

These are schedulers that were told a metric, what the caller has set in the optimizers' groups, and the caller's own
state. Not looked at is what only moves with a step or a batch, and what each life of a run changes by itself: a run
that is opened and closed at its end again and again saves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.saver import encode, read_state, same_tensors, saved_names
from holdfast.checkpoint.store import Entry
from holdfast.data.signalled import let_through
from holdfast.run.components import component_of, live_tensors
from holdfast.run.parts import Parts

if TYPE_CHECKING:
    from holdfast.run.session import Session


def save_the_rest(session: Session, open_again: Callable[[], None]) -> None:
    """Save what no checkpoint holds as a run is closed: steps, or what has changed without one.

    Args:
        session: Of the run.
        open_again: Takes the run directory, if it was released.

    Raises:
        HoldfastError: what `open_again` raises, if steps would be lost. Where none would, training has ended well,
            and ``changes_not_saved`` says what is in the way.
    """
    session.saving.finish()
    try:
        if not session.saving.has_unsaved and not session.has_changed():
            return
        if not session.is_open:
            open_again()
    except Exception as error:
        let_through(error)
        if session.saving.has_unsaved:
            raise
        why = str(error) if isinstance(error, _OthersWeightsError) else f"{type(error).__name__}: {error}"[:500]
        session.record.happened("changes_not_saved", why=why)
        return
    session.saving.save_again()


def changed_without_a_step(parts: Parts, entry: Entry) -> bool:
    """Return whether something is to be saved.

    What was done to weights or moments without a step, such as an average put in their place, another type for an
    export, or statistics of other data, must never replace the state of the training.

    Args:
        parts: The objects.
        entry: The newest checkpoint, of the same step and batch.

    Raises:
        _OthersWeightsError: if weights, buffers or moments were changed as well.
        Exception: what a part of the caller's raises that cannot tell its state.

    Cost: digests of the caller's state; of all tensors, if something has changed.
    """
    if not _differs(parts, entry):
        return False
    if not _tensors_are_those_of(parts, entry):
        raise _OthersWeightsError
    return True


class _OthersWeightsError(Exception):
    """What is here is not the state of the training."""

    def __str__(self) -> str:
        return "the weights, buffers or moments were changed without a step, so they are not those of the training"


def _differs(parts: Parts, entry: Entry) -> bool:
    trees: dict[str, Any] = {f"state.{name}": each.state_dict() for name, each in parts.states.items()}
    for name, optimizer in parts.optimizers.items():
        trees[component_of("optimizer", name)] = {"param_groups": optimizer.state_dict()["param_groups"]}
    trees["training"] = {"schedulers": {name: each.state_dict() for name, each in parts.schedulers.items()}}
    now, then = encode(trees), read_state(entry)
    for component, state in now.state.items():
        saved = then.get(component)
        if not component.startswith("state."):
            saved = {key: saved.get(key) for key in state} if isinstance(saved, dict) else None
        if saved != json.loads(json.dumps(state)) or not same_tensors(entry, component, now.tensors[component]):
            return True
    return False


def _tensors_are_those_of(parts: Parts, entry: Entry) -> bool:
    for component, found in live_tensors(parts).items():
        names = {name for name in found if not name.startswith("param_groups")}  # such as a rate that is a tensor
        saved = {name for name in saved_names(entry, component) if not name.startswith("param_groups")}
        if names != saved or not same_tensors(entry, component, {name: found[name] for name in names}):
            return False
    return True
