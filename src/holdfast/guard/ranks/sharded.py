"""A model that `fully_shard` has spread.

Each rank holds some rows of each parameter, its gradient and its moments.

A rank alone can run no part of it. One that cannot go on begins what the others begin, as their
tapes say, with its shards and with gradients of NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.checkpoint.tensor_files import Share
from holdfast.core.errors import CheckpointError
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.tape import ROW, Tape
from holdfast.guard.saving.components import component_of
from holdfast.guard.state.trees import copied
from holdfast.numerics.gradients import local

# The newer name where there is one: torch warns of the other.
_scatter: Any = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)
_ALONE = (
    "where it came from is not traced, since one rank alone cannot run a model that lies on all of"
    " them"
)


class Sharded:
    """One sharded model."""

    why_not_alone = _ALONE
    sends_before_row = True  # shards of the weights
    ignored: ClassVar[list[str]] = []
    why_not_apart = "a step over several batches of a sharded model"
    # What ranks would have to agree about pass by pass.
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"micro_batch_size": ("auto", None)}
    order: ClassVar[list[int]] = []  # of gradients, by which nothing is laid out here
    # Ranks make equally many passes: none splits a batch. What all recompute, none tries to do
    # without.
    unobserved: ClassVar[Mapping[str, Any]] = {
        "diagnose": False,
        "micro_batch_size": None,
        "grow_after_steps": 2**31,
    }

    def __init__(self, model: nn.Module) -> None:
        self._root: Any = model
        self._modules: list[Any] = [
            module for module in model.modules() if isinstance(module, FSDPModule)
        ]
        self.group: Any = distributed.group.WORLD
        first = next(p for p in model.parameters() if isinstance(p, DTensor))
        self.device = first.to_local().device
        self._mesh = first.device_mesh
        self._shards: Any = self._mesh.get_group(self._mesh.ndim - 1)
        self.scales = False  # losses, as fp16 needs it
        self._groups: list[Any] = []  # torch's groups of parameters, of each module
        self._unknown: str | None = None  # why its collectives cannot be begun by hand

    def record(self, tape: Tape) -> None:
        """Note from now on what this rank begins."""
        self._tape = tape
        if self._mesh.ndim > 1:
            self._unknown = "copies of its shards would go on without it"
        elif not hasattr(self._root, "reset_iter_state"):
            self._unknown = "this version of torch cannot forget half of an attempt"
        for at, module in enumerate(self._modules if self._unknown is None else ()):
            groups = module._get_fsdp_state()._fsdp_param_groups
            self._groups.append(groups[0] if groups else None)
            if len(groups) > 1 or any(group._use_post_forward_mesh for group in groups):
                self._unknown = "a module of it is spread in several ways"
            elif groups:
                gather, scatter = groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm
                module.set_custom_all_gather(_Noted(gather, partial(_note, tape, "gather", at)))
                module.set_custom_reduce_scatter(
                    _Noted(scatter, partial(_note, tape, "scatter", at))
                )

    def begin(self) -> None:
        """Begin an attempt.

        An evaluation, whose forward pass no backward follows, leaves whole parameters behind.
        """
        for module in self._modules:
            module.reshard()
        self._tape.begin()

    def keeps_apart(self, _: str) -> bool:
        """Return True: nobody sends buffers from one rank to the others."""
        return True

    def row_begins(self) -> None:
        """Note that the row is about to begin."""
        self._tape.note(self.group, ROW)

    def row_begun(self) -> None:
        """Nothing is counted from here."""

    def end(self) -> None:
        """Note that the attempt is over."""
        self._tape.end()

    def own_collectives(self) -> int:
        """Return how many collectives of the loss or the model this attempt has begun.

        0 where they cannot be told apart from torch's.
        """
        return 0 if self._unknown is not None else self._tape.collectives.begun().total()

    def why_unpayable(self) -> str | None:
        """Return why this rank cannot begin by hand what the others wait for; None: it can."""
        return "the scaler of fp16 talks to the others as well" if self.scales else self._unknown

    def follow(self, row: Callable[[], None]) -> str | None:
        """Begin all that the others begin in this attempt; `row` begins that one.

        Return what is in the way, or None.
        """
        self._forget()
        hindered = self._tape.follow(partial(self._begin_by_hand, row))
        self._forget()
        return hindered

    def _forget(self) -> None:
        # In the middle of backward those that are whole have gradients
        for parameter in self._root.parameters():
            parameter.grad = None
        if self._root._get_fsdp_state()._is_root:  # None before the first forward pass
            self._root.reset_iter_state()

    def _begin_by_hand(self, row: Callable[[], None], kind: str, *about: Any) -> None:
        if kind == ROW:
            row()
        elif kind == "gather":  # with the real weights: the others compute with them
            module = self._modules[about[0]]
            module.unshard()
            module.reshard()
        elif kind == "scatter":
            at, size, dtype, averages = about
            op = distributed.ReduceOp.AVG if averages else distributed.ReduceOp.SUM
            group, given = self._groups[at]._reduce_scatter_process_group, self._nan(size, dtype)
            _scatter(given.new_empty(size // group.size()), given, op=op, group=group)
        else:
            distributed.all_reduce(self._nan(*about), group=self._shards)

    def _nan(self, size: int, dtype: str) -> torch.Tensor:
        return torch.full((size,), math.nan, dtype=getattr(torch, dtype), device=self.device)

    def reset(self) -> None:
        """Forget an attempt that one rank has not made, on all ranks."""
        self._tape.count_failed_attempt()

    def lay_out(self, order: list[int]) -> None:
        """Nothing is laid out."""

    def norms(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms of whole gradients, of those of the shards.

        Torch's own arithmetic, in one collective.
        """
        squares = torch.stack(list(own)).pow(2)
        self._tape.note(self._shards, "norms", len(own), _name_of(squares.dtype))
        distributed.all_reduce(squares, group=self._shards)
        return list(squares.pow(0.5))

    def share(self, trees: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        """Return what one rank saves: its rows of what is sharded; the first one also all else."""

        def own(tensor: torch.Tensor) -> Any:
            if not isinstance(tensor, DTensor):
                return tensor if is_first else None  # another rank saves the same
            if (why := _other_than_rows(tensor)) is not None:
                fix = (
                    "use an optimizer whose moments have the shape of their weights, such as AdamW."
                )
                raise CheckpointError(
                    f"the state {why}", limit="each rank saves some rows", fix=fix, rule="H310"
                )
            return None if any((tensor.device_mesh.get_coordinate() or ())[:-1]) else local(tensor)

        spread = [
            component
            for component in trees
            if component.partition(".")[0] in ("model", "optimizer")
        ]
        return {
            **(trees if is_first else {}),
            **{component: copied(trees[component], own) for component in spread},
        }

    def shares(self, parts: Parts) -> Callable[[str, str, torch.Size], Share | None]:
        """Return what says which rows of a saved tensor are for this rank, of component, name and
        shape.

        Moments are spread like their parameters, whoever has saved them.
        """
        weights = {
            component_of("model", name): model.state_dict() for name, model in parts.models.items()
        }
        moved = {
            component_of("optimizer", name): [
                p for group in each.param_groups for p in group["params"]
            ]
            for name, each in parts.optimizers.items()
        }

        def find(component: str, name: str, shape: torch.Size) -> Share | None:
            like = weights.get(component, {}).get(name)
            if component in moved and (found := re.match(r"state\.(\d+)\.", name)) is not None:
                like = moved[component][int(found[1])]
            return _rows_of(like) if isinstance(like, DTensor) and like.shape == shape else None

        return find


class _Noted:
    """A collective of torch's own that says when it is begun."""

    def __init__(self, collective: Any, note: Callable[..., None]) -> None:
        self._collective, self._note = collective, note
        self.allocate = collective.allocate

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any = None, **given: Any
    ) -> Any:
        if op is None:
            self._note(group)
            return self._collective(output_tensor, input_tensor, group, **given)
        self._note(
            group,
            input_tensor.numel(),
            _name_of(input_tensor.dtype),
            op != distributed.ReduceOp.SUM,
        )
        return self._collective(output_tensor, input_tensor, group, op, **given)


def _note(tape: Tape, kind: str, module: int, group: Any, *about: Any) -> None:
    tape.note(group, kind, module, *about)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def why_unknown(parameter: torch.Tensor, world_size: int) -> str | None:
    """Return what about the way in which a parameter is spread is not known to us, or None."""
    if not isinstance(parameter, DTensor):
        return "is sharded in part only" if parameter.requires_grad else None
    size = parameter.device_mesh.size()
    return (
        f"is spread over {size} of the ranks" if size != world_size else _other_than_rows(parameter)
    )


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
            own,
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    return Share(begin=begin, end=begin + held, whole=whole)
