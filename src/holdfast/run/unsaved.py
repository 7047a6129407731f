"""What has changed since the last save although no step was made, so that the position does not show it.

These are schedulers that were told a metric, what the caller has set in the optimizers' groups, and the caller's own
state. Not looked at is what only moves with a step or a batch, and what each life of a run changes by itself: a run
that is opened and closed at its end again and again saves nothing.
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.checkpoint.saver import encode, read_state, same_tensors
from holdfast.checkpoint.store import Entry
from holdfast.data.signalled import let_through
from holdfast.run.components import component_of
from holdfast.run.parts import Parts


def changed_without_a_step(parts: Parts, entry: Entry) -> tuple[bool, str | None]:
    """Return whether something is to be saved, and if it is not, what is in the way.

    What was done to the weights without a step, such as an average put in their place or another type for an export,
    must never replace the state of the training: then nothing is saved.

    Args:
        parts: The objects.
        entry: The newest checkpoint, of the same step and batch.

    Cost: digests of the caller's state; of the weights too, if something has changed.
    """
    try:
        if not _differs(parts, entry):
            return False, None
        if _weights_are_those_of(parts, entry):
            return True, None
    except Exception as error:  # noqa: BLE001 - such as a part of the caller's that cannot tell its state
        let_through(error)
        return False, f"{type(error).__name__}: {error}"[:500]
    return False, "the weights were changed without a step, so they are not those of the training"


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


def _weights_are_those_of(parts: Parts, entry: Entry) -> bool:
    trees = {component_of("model", name): dict(each.named_parameters()) for name, each in parts.models.items()}
    return all(same_tensors(entry, component, found) for component, found in encode(trees).tensors.items())
