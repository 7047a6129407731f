"""Save and restore the random generators and the stateful samplers of a loader."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from holdfast.guard.state.trees import copied
from holdfast.loader.foreign.carried_state import sources_of_state
from holdfast.loader.samplers import is_stateful


def state_of_generator(value: Any) -> Any:
    """Return the state of a random generator of torch, Python or NumPy."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.bit_generator.state


def states_of_sources(loader: Any) -> list[Any]:
    """Return the states of a loader's random generators and stateful samplers."""
    return [
        copied(source.state_dict()) if is_stateful(source) else state_of_generator(source)
        for source in sources_of_state(loader)
    ]


def restore_sources(loader: Any, states: Iterable[Any]) -> None:
    """Restore the states that `states_of_sources` has returned."""
    for source, state in zip(sources_of_state(loader), states, strict=False):
        if is_stateful(source):
            source.load_state_dict(copied(state))
        else:
            restore_generator(source, state)


def restore_generator(value: Any, state: Any) -> None:
    """Restore what `state_of_generator` has returned."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value.bit_generator.state = state
