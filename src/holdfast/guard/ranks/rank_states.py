"""`RankStates`: state that a checkpoint holds separately for each rank.

Some of this state always differs between ranks, such as random states. Other state is saved per
rank only if it is found to differ, such as buffers that are not broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from holdfast.guard.ranks.differing_state import Digests, EntriesByKind, differing_names, select
from holdfast.guard.ranks.messages import Messages
from holdfast.guard.ranks.state_transfer import StateTransfer
from holdfast.loader.random_state import RandomState, of_another_rank


@final
class RankStates:
    """Gathers the states of all ranks for a checkpoint. Used by `ProcessGroupRanks`.

    Args:
        messages: The connection to the other ranks.
        transfer: Copies state from another rank to a rank whose optimizer has failed.
    """

    def __init__(self, messages: Messages, transfer: StateTransfer) -> None:
        self._messages = messages
        self._transfer = transfer
        self._digests = Digests()

    def gather(
        self,
        own: Callable[[], Mapping[str, Any]],
        trees: Callable[[], EntriesByKind],
        constant: Callable[[], Iterable[str]],
        unsaved: Callable[[], Iterable[str]],
    ) -> list[dict[str, Any]]:
        """Return the states of all ranks in order of rank; see `Ranks.gather_states`.

        A rank whose optimizer failed in the last step first receives the state of another rank.
        """
        own_trees = trees()
        digests = self._digests.compute(own_trees, constant())
        is_behind = self._transfer.is_behind
        states = self._messages.exchange(
            "a checkpoint or close", {**own(), "behind": is_behind, "digests": digests}
        )
        self._transfer.catch_up([state.pop("behind") for state in states])
        names = differing_names([state.pop("digests") for state in states])
        names["buffers"] += [
            name
            for name in unsaved()
            if name in digests["buffers"] and name not in names["buffers"]
        ]
        if any(names.values()):
            # Only the first rank receives the states, since it writes the checkpoint.
            differing_trees = self._messages.to_first(
                "what differs between ranks", select(own_trees, names)
            )
            for state, trees_of_rank in zip(states, differing_trees or [], strict=False):
                state.update(trees_of_rank)
        return states


def state_of_rank(states: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Return the state of a rank from a checkpoint that was written by the same number of ranks.

    Its position in the data may be replaced by that of rank 0; see `_common_position`.

    Args:
        states: The states of all ranks, as `RankStates.gather` returned them.
        rank: The rank.
    """
    own = states[rank]
    return {**own, "position": _common_position(own["position"], states[0]["position"])}


def state_of_new_rank(training: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the state of a rank from a checkpoint that a different number of ranks has written.

    The rank gets a new random state.

    Args:
        training: The guard's own part of the checkpoint.
        rank: The rank.
    """
    random_state = of_another_rank(RandomState.from_tree(training["random_state"]), rank)
    return {
        "random_state": random_state.to_tree(),
        "position": training["position"],
        "ladder": training["ladder"],
    }


def _common_position(
    own: dict[str, Any] | None, first: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the position at which a rank continues in the data.

    Normally, this is the rank's own position, which equals that of the first rank. In checkpoints
    from older versions, without the check in `Rows`, the positions may differ, because a single
    rank could skip a batch. In that case, all ranks continue at the position of the first rank.
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
