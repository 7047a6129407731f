"""A model under ``fully_shard``: each rank holds some rows of each parameter, gradient and moment.

No rank can run the model alone. A rank whose attempt has failed starts the same collectives as the
other ranks, according to their tapes. It sends its real shards of the weights, but NaN as
gradients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from holdfast.checkpoint.tensor_files import Share
from holdfast.core.errors import CheckpointError
from holdfast.guard.optimizers import optimizers_inside
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.distributed_model import DistributedModel
from holdfast.guard.ranks.tape import GATHER, NORMS, ROW, SCATTER, Entry, Tape
from holdfast.guard.saving.components import component_of
from holdfast.guard.state.trees import copied
from holdfast.numerics.gradients import local

# Newer versions of torch warn about the older name.
_scatter: Any = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


@final
class ShardedModel(DistributedModel):
    """The model under ``fully_shard``. Used by `FsdpRanks`.

    Args:
        model: The module that was passed to ``fully_shard``.
        tape: Records the collectives of this rank.
    """

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        first = next(p for p in model.parameters() if isinstance(p, DTensor))
        super().__init__(distributed.group.WORLD, first.to_local().device)
        self._root: Any = model
        self._modules: list[Any] = [
            module for module in model.modules() if isinstance(module, FSDPModule)
        ]
        self._tape = tape
        self._mesh = first.device_mesh
        self._shards: Any = self._mesh.get_group(self._mesh.ndim - 1)
        # torch's parameter group for each of these modules, or None for a module without one.
        self._groups: list[Any] = []
        # Why the model's collectives cannot be started by hand. None if they can.
        self._obstacle: str | None = None
        self._record_collectives()

    def _record_collectives(self) -> None:
        """Make torch record the collectives that it starts for this model on the tape."""
        if self._mesh.ndim > 1:
            self._obstacle = "other replicas of its shards would continue without this rank"
        elif not hasattr(self._root, "reset_iter_state"):
            self._obstacle = "this version of torch cannot discard an unfinished attempt"
        for at, module in enumerate(self._modules if self._obstacle is None else ()):
            groups = module._get_fsdp_state()._fsdp_param_groups
            self._groups.append(groups[0] if groups else None)
            if len(groups) > 1 or any(group._use_post_forward_mesh for group in groups):
                self._obstacle = "one of its modules is sharded in several ways"
            elif groups:
                gather = _RecordedGather(groups[0]._all_gather_comm, self._tape, at)
                module.set_custom_all_gather(gather)
                scatter = _RecordedScatter(groups[0]._reduce_scatter_comm, self._tape, at)
                module.set_custom_reduce_scatter(scatter)

    @property
    def allowed_values(self) -> Mapping[str, Sequence[Any]]:
        """Return the policy fields that this model restricts, mapped to their allowed values."""
        # With micro-batches, the ranks would have to agree on their size before each pass.
        return {"micro_batch_size": ("auto", None)}

    @property
    def policy_overrides(self) -> Mapping[str, Any]:
        """Return the policy fields that this model overrides, mapped to their new values."""
        # All ranks must run the same number of passes, so batches are not split. All ranks must
        # recompute the same modules, so no rank tries to recompute fewer of them.
        return {"diagnose": False, "micro_batch_size": None, "grow_after_steps": 2**31}

    @property
    def sends_before_row(self) -> bool:
        """Return True, because the weights are gathered before the ranks exchange their rows."""
        return True

    def begin_attempt(self) -> None:
        """Start an attempt.

        Parameters are resharded first, since an evaluation has no backward pass and leaves them
        unsharded.
        """
        for module in self._modules:
            module.reshard()
        self._tape.begin()

    def may_differ(self, name: str) -> bool:  # noqa: ARG002 - the same for all names
        """Return True, because buffers are not broadcast."""
        return True

    def before_row(self) -> None:
        """Record that this rank is about to send its row to the other ranks."""
        self._tape.note(self.group, Entry(ROW))

    def after_row(self) -> None:
        """Do nothing, since no count of collectives starts at this point."""

    def end_attempt(self) -> None:
        """Record that the attempt has ended, whether or not it succeeded."""
        self._tape.end()

    def own_collectives(self) -> int:
        """Return how many collectives the loss or the model started in this attempt.

        The result is 0 if they cannot be distinguished from the collectives of torch.
        """
        if self._obstacle is not None:
            return 0
        return self._tape.collectives.started().total()

    def why_not_completable(self) -> str | None:
        """Return why this model's collectives cannot be started by hand, or None if they can."""
        return self._obstacle

    def follow(self, exchange_row: Callable[[], None]) -> str | None:
        """Start the collectives that the other ranks start in this attempt.

        Args:
            exchange_row: Function that sends this rank's row and waits for those of the others.

        Returns:
            None, or the reason why the collectives cannot be started.
        """
        self._forget()
        obstacle = self._tape.follow(partial(self._start_by_hand, exchange_row))
        self._forget()
        return obstacle

    def _forget(self) -> None:
        """Clear state that an unfinished attempt has left in the parameters and in FSDP."""
        # In the middle of backward, unsharded parameters may have gradients.
        for parameter in self._root.parameters():
            parameter.grad = None
        # `_is_root` is None before the first forward pass.
        if self._root._get_fsdp_state()._is_root:
            self._root.reset_iter_state()

    def _start_by_hand(self, exchange_row: Callable[[], None], entry: Entry) -> None:
        """Start a collective from another rank's tape. If it reduces gradients, send NaN.

        Args:
            exchange_row: Function that sends this rank's row and waits for those of the others.
            entry: The tape's entry for the collective.
        """
        if entry.kind == ROW:
            exchange_row()
        elif entry.kind == GATHER:
            # Gather the real weights, because the other ranks compute with them.
            module = self._modules[entry.module]
            module.unshard()
            module.reshard()
        elif entry.kind == SCATTER:
            op = distributed.ReduceOp.AVG if entry.averages else distributed.ReduceOp.SUM
            group = self._groups[entry.module]._reduce_scatter_process_group
            gradients = self._nan(entry)
            shard = gradients.new_empty(len(gradients) // group.size())
            _scatter(shard, gradients, op=op, group=group)
        else:
            assert entry.kind == NORMS
            distributed.all_reduce(self._nan(entry), group=self._shards)

    def _nan(self, entry: Entry) -> torch.Tensor:
        """Return a tensor of NaN that replaces the input of a collective."""
        dtype = getattr(torch, entry.dtype)
        return torch.full((entry.size,), math.nan, dtype=dtype, device=self.device)

    def discard_attempt(self) -> None:
        """Do nothing, since `follow` has already discarded the attempt."""

    @property
    def gradient_order(self) -> list[int]:
        """Return an empty list, since the order of gradients does not matter here."""
        return []

    def lay_out_gradients(self, order: list[int]) -> None:
        """Do nothing, since the order of gradients does not matter here."""

    def norms(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms of the whole gradients, computed with the same arithmetic as in torch.

        All norms are reduced in a single collective.

        Args:
            own: The norms of this rank's shards, each of shape ``()``.
        """
        squares = torch.stack(list(own)).pow(2)
        entry = Entry(NORMS, size=len(own), dtype=_name_of(squares.dtype))
        self._tape.note(self._shards, entry)
        distributed.all_reduce(squares, group=self._shards)
        return list(squares.pow(0.5))

    def part_to_save(self, trees: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        """Return this rank's part of a checkpoint.

        Each rank saves its rows of the sharded tensors. The first rank also saves everything else.

        Args:
            trees: The state of all components.
            is_first: Whether this is the first rank.
        """
        parts = dict(trees) if is_first else {}
        for component, tree in trees.items():
            if component.partition(".")[0] in ("model", "optimizer"):
                parts[component] = copied(tree, partial(_own_part, is_first=is_first))
        return parts

    def rows_to_load(self, parts: Parts) -> Callable[[str, str, torch.Size], Share | None]:
        """Return a function that determines which rows of a saved tensor this rank needs.

        The function takes the component, the name and the shape of the tensor. Moments are sharded
        in the same way as their parameters, even if they were saved by a run without sharding.
        """
        weights = {
            component_of("model", name): model.state_dict() for name, model in parts.models.items()
        }
        optimized = {
            component_of("optimizer", name): [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            for name, optimizer in parts.optimizers.items()
        }

        def find(component: str, name: str, shape: torch.Size) -> Share | None:
            parameter = weights.get(component, {}).get(name)
            moment = re.match(r"state\.(\d+)\.", name)
            if component in optimized and moment is not None:
                parameter = optimized[component][int(moment[1])]
            if isinstance(parameter, DTensor) and parameter.shape == shape:
                return _rows_of(parameter)
            return None

        return find


def _own_part(tensor: torch.Tensor, *, is_first: bool) -> Any:
    """Return the part of a tensor that this rank saves, or None if another rank saves it.

    Raises:
        CheckpointError: H310 if the tensor is sharded other than by rows.
    """
    if not isinstance(tensor, DTensor):
        return tensor if is_first else None
    problem = _other_than_rows(tensor)
    if problem is not None:
        raise CheckpointError(
            f"the state {problem}",
            limit="each rank saves some rows of each tensor",
            fix="use an optimizer whose moments have the shape of their weights, such as AdamW.",
            rule="H310",
        )
    coordinates = tensor.device_mesh.get_coordinate() or ()
    # Tensors are sharded over the last dimension of the mesh. The other dimensions hold replicas,
    # of which only the first one is saved.
    is_replica = any(coordinates[:-1])
    return None if is_replica else local(tensor)


@final
class _RecordedGather:
    """Wraps torch's all-gather of a module's weights, to record it on the tape.

    Args:
        collective: torch's own all-gather.
        tape: The tape on which the collective is recorded.
        module: The index of the module among the modules that are passed to ``fully_shard``.
    """

    def __init__(self, collective: Any, tape: Tape, module: int) -> None:
        self._collective = collective
        self._tape = tape
        self._entry = Entry(GATHER, module=module)
        self.allocate = collective.allocate

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **options: Any) -> Any:
        self._tape.note(group, self._entry)
        return self._collective(output_tensor, input_tensor, group, **options)


@final
class _RecordedScatter:
    """Wraps torch's reduce-scatter of a module's gradients, to record it on the tape.

    Args:
        collective: torch's own reduce-scatter.
        tape: The tape on which the collective is recorded.
        module: The index of the module among the modules that are passed to ``fully_shard``.
    """

    def __init__(self, collective: Any, tape: Tape, module: int) -> None:
        self._collective = collective
        self._tape = tape
        self._module = module
        self.allocate = collective.allocate

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, **options: Any
    ) -> Any:
        entry = Entry(
            SCATTER,
            module=self._module,
            size=input_tensor.numel(),
            dtype=_name_of(input_tensor.dtype),
            averages=op != distributed.ReduceOp.SUM,
        )
        self._tape.note(group, entry)
        return self._collective(output_tensor, input_tensor, group, op, **options)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def why_unsupported(parameter: torch.Tensor, world_size: int) -> str | None:
    """Return why the sharding of a parameter is not supported, or None if it is."""
    if not isinstance(parameter, DTensor):
        return "is sharded in part only" if parameter.requires_grad else None
    size = parameter.device_mesh.size()
    if size != world_size:
        return f"is sharded over {size} of the ranks"
    return _other_than_rows(parameter)


def too_few_rows_for_muon(optimizer: Optimizer) -> torch.Tensor | None:
    """Return a sharded matrix that torch's Muon cannot update, or None.

    Muon multiplies whole matrices, for which DTensor starts collectives. For a matrix with fewer
    rows than there are shards, the update has no shards that could be added to those of the matrix.

    Args:
        optimizer: The optimizer, which may be a wrapper.
    """
    for holder in (optimizer, *optimizers_inside(optimizer)):
        if not isinstance(holder, torch.optim.Muon):
            continue
        for group in holder.param_groups:
            for matrix in group["params"]:
                mesh = matrix.device_mesh
                if matrix.shape[0] < mesh.size(mesh.ndim - 1):
                    return cast("torch.Tensor", matrix)
    return None


def _other_than_rows(tensor: DTensor) -> str | None:
    """Return a description of a tensor's sharding, or None if it is supported.

    Only sharding by rows, over the last dimension of the tensor's mesh, is supported.
    """
    *others, last = tensor.placements
    if last == Shard(0) and all(placement == Replicate() for placement in others):
        return None
    return f"is sharded as {tensor.placements}"


def _rows_of(parameter: DTensor) -> Share:
    """Return the range of a parameter's rows that this rank holds."""
    mesh = parameter.device_mesh
    rows = parameter.shape[0]
    held = parameter.to_local().shape[0]
    last = mesh.ndim - 1
    # Round up, as torch does. The last ranks may hold fewer rows, or none.
    rows_per_rank = -(-rows // mesh.size(last))
    begin = min(rows, mesh.get_local_rank(last) * rows_per_rank)

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
