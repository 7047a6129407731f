"""A model that `fully_shard` has spread: each rank holds some rows of each parameter, its gradient and its moments.

A rank alone can run no part of it, and nobody can begin a collective in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.checkpoint.saver import Share
from holdfast.core.errors import CheckpointError
from holdfast.guard.parts import Parts
from holdfast.guard.saving.components import component_of
from holdfast.guard.state.trees import copied
from holdfast.numerics.gradients import local

_ALONE = "one rank alone cannot run a model that lies on all of them"


class Sharded:
    """One sharded model."""

    why_not_alone = _ALONE
    # What ranks would have to agree about pass by pass, or what reads whole parameters.
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "micro_batch_size": ("auto", None),
        "adaptive_clip_factor": (None,),
    }
    unobserved: ClassVar[Mapping[str, Any]] = {"diagnose": False}
    order: ClassVar[list[int]] = []  # of gradients, by which nothing is laid out here

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.group: Any = distributed.group.WORLD
        first = next(p for p in model.parameters() if isinstance(p, DTensor))
        self.device = first.to_local().device
        self._shards: Any = first.device_mesh.get_group(first.device_mesh.ndim - 1)

    def begin(self) -> None:
        """Begin an attempt. An evaluation, whose forward pass no backward follows, leaves whole parameters behind."""
        for module in self._modules:
            module.reshard()

    def row_begun(self) -> None:
        """Note that the row is under way."""

    def end(self) -> None:
        """Note that the attempt is over."""

    def lay_out(self, order: list[int]) -> None:
        """Nothing is laid out."""

    def norms(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms of whole gradients, of those of the shards: torch's own arithmetic, in one collective."""
        squares = torch.stack(list(own)).pow(2)
        distributed.all_reduce(squares, group=self._shards)
        return list(squares.pow(0.5))

    def share(self, trees: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        """Return what one rank saves: its rows of what is sharded; the first one also all else."""

        def own(tensor: torch.Tensor) -> Any:
            if not isinstance(tensor, DTensor):
                return tensor if is_first else None  # another rank saves the same
            if (why := _other_than_rows(tensor)) is not None:
                fix = "use an optimizer whose moments have the shape of their weights, such as AdamW."
                raise CheckpointError(f"the state {why}", limit="each rank saves some rows", fix=fix, rule="H310")
            return None if any((tensor.device_mesh.get_coordinate() or ())[:-1]) else local(tensor)

        spread = [component for component in trees if component.partition(".")[0] in ("model", "optimizer")]
        return {**(trees if is_first else {}), **{component: copied(trees[component], own) for component in spread}}

    def shares(self, parts: Parts) -> Callable[[str, str, torch.Size], Share | None]:
        """Return what says which rows of a saved tensor are for this rank, of component, name and shape.

        Moments are spread like their parameters, whoever has saved them.
        """
        weights = {component_of("model", name): model.state_dict() for name, model in parts.models.items()}
        moved = {
            component_of("optimizer", name): [p for group in each.param_groups for p in group["params"]]
            for name, each in parts.optimizers.items()
        }

        def find(component: str, name: str, shape: torch.Size) -> Share | None:
            like = weights.get(component, {}).get(name)
            if component in moved and (found := re.match(r"state\.(\d+)\.", name)) is not None:
                like = moved[component][int(found[1])]
            return _rows_of(like) if isinstance(like, DTensor) and like.shape == shape else None

        return find


def why_unknown(parameter: torch.Tensor, world_size: int) -> str | None:
    """Return what about the way in which a parameter is spread is not known to us, or None."""
    if not isinstance(parameter, DTensor):
        return "is sharded in part only" if parameter.requires_grad else None
    size = parameter.device_mesh.size()
    return f"is spread over {size} of the ranks" if size != world_size else _other_than_rows(parameter)


def _other_than_rows(tensor: DTensor) -> str | None:
    *others, last = tensor.placements
    if last == Shard(0) and all(each == Replicate() for each in others):
        return None
    return f"is spread as {tensor.placements}"


def _rows_of(parameter: DTensor) -> Share:
    """Return which rows of a parameter this rank holds."""
    mesh, rows, held = parameter.device_mesh, parameter.shape[0], parameter.to_local().shape[0]
    begin = min(rows, mesh.get_local_rank(mesh.ndim - 1) * -(-rows // mesh.size(mesh.ndim - 1)))

    def whole(own: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(
            own, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    return Share(begin=begin, end=begin + held, whole=whole)
