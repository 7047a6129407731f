"""The modules of a job that could be recomputed, and their passes: where each begins and ends, what it leaves."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.forecast.trace.events import BlockRun
from holdfast.forecast.trace.recording import Recording
from holdfast.forecast.trace.storages import Storages, tensors_in
from holdfast.memory.recompute import find_repeated_blocks

_LEAF = 2**64 - 1  # sequence number of a node that accumulates a leaf's gradient
_Node = tuple[Any, list[Any]]  # and what it saves


def find_blocks(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules that could be recomputed: repeated blocks, or else the children that have parameters."""
    found: list[tuple[str, nn.Module]] = []
    for prefix, model in models.items():
        children = [(name, child) for name, child in model.named_children() if any(True for _ in child.parameters())]
        blocks = find_repeated_blocks(model) or children
        found += [(".".join(filter(None, (prefix, name))), block) for name, block in blocks]
    return found


def modules_named(names: Sequence[str], models: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return modules by the names that `find_blocks` gives (H412 for a name that no module has)."""
    known = {
        ".".join(filter(None, (prefix, name))): module
        for prefix, model in models.items()
        for name, module in model.named_modules()
    }
    for name in names:
        if name not in known:
            raise PolicyError(
                f"recompute={name!r}",
                limit="the models have no module of that name",
                fix=did_you_mean(name, known, otherwise="name a module of the model."),
                rule="H412",
            )
    return [known[name] for name in names]


class BlockRuns:
    """Record the passes of blocks."""

    def __init__(self, storages: Storages) -> None:
        self.names: list[str] = []
        self._storages = storages
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._begun: list[tuple[int, BlockRun | None, int]] = []

    def watch(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        """Watch more blocks."""
        for name, module in blocks:
            number = len(self.names)
            self.names.append(name)

            def begin(_: nn.Module, args: Any, kwargs: Any, number: int = number) -> None:
                self._begin(number, args, kwargs)

            def end(_: nn.Module, __: Any, outputs: Any, number: int = number) -> None:
                self._end(number, outputs)

            self._handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(end))

    def forget(self) -> None:
        """Begin anew, as between two steps."""
        self._begun.clear()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, number: int, args: Any, kwargs: Any) -> None:
        record = self._storages.record
        run = None
        if record is not None and torch._C._current_graph_task_id() == -1:  # a recomputation is none of its passes
            found = dict.fromkeys(self._storages.number_of(tensor) for tensor in tensors_in((args, kwargs)))
            run = BlockRun(
                block=number,
                forward=(len(record.events), -1),
                backward=-1,
                kept=(),
                operations=(len(record.operations), -1),
                inputs=tuple(one for one in found if one is not None and not self._storages.is_parameter(one)),
            )
        self._begun.append((number, run, torch._C._autograd._get_sequence_nr()))

    def _end(self, number: int, outputs: Any) -> None:
        while self._begun:
            begun, run, first_node = self._begun.pop()
            if begun == number:
                break
        else:
            return
        record = self._storages.record
        if run is None or record is None:
            return
        tensors = list(tensors_in(outputs))
        first, last = run.forward[0], len(record.events)
        made = {event - 1 for event in record.events[first:last] if event > 0}
        numbers = dict.fromkeys(map(self._storages.number_of, tensors))
        kept = tuple(one for one in numbers if one is not None and one in made)
        # Whether a checkpoint, or an offload, of the user's surrounds what is running.
        packed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003
        nodes = [] if packed else _read_nodes(tensors, first_node)
        record.block_runs.append(
            replace(
                run,
                forward=(first, last),
                operations=(run.operations[0], len(record.operations)),
                kept=kept,
                saved=None if packed else self._saved(kept, nodes),
            )
        )
        values = [value for _, saved in nodes for value in saved]
        if packed or (values and not any(isinstance(value, torch.Tensor) for value in values)):
            return  # it is recomputed already: a checkpoint of the user's is around or within it
        _await(_Arrival(record, len(record.block_runs) - 1), tensors, nodes)

    def _saved(self, kept: tuple[int, ...], nodes: list[_Node]) -> tuple[int, ...]:
        """Return which outputs the block's own graph saves."""
        held = {self._storages.number_of(one) for _, saved in nodes for one in saved if isinstance(one, torch.Tensor)}
        return tuple(number for number in kept if number in held)


class _Arrival:
    """Note the first gradient that arrives at an output, or at a node that needs what it has saved."""

    __slots__ = ("_place", "_record")

    def __init__(self, record: Recording, place: int) -> None:
        self._record = record
        self._place = place

    def __call__(self, _: Any) -> None:
        run = self._record.block_runs[self._place]
        if run.backward < 0:
            self._record.block_runs[self._place] = replace(run, backward=len(self._record.events))


def _await(arrival: _Arrival, outputs: list[torch.Tensor], nodes: list[_Node]) -> None:
    """Have the first of the nodes that has saved anything noted, or the first gradient of an output if none has."""
    saving = [node for node, saved in nodes if saved]
    for node in saving:
        node.register_prehook(arrival)
    for tensor in outputs:
        if tensor.requires_grad and not saving:
            tensor.register_hook(arrival)  # type: ignore[no-untyped-call]


def _read_nodes(outputs: Iterable[torch.Tensor], first_node: int) -> list[_Node]:
    """Return the nodes made since `first_node` and what they save, without unpacking it: that may recompute."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs]
    seen = {}
    while pending:
        node = pending.pop()
        if node is None or node in seen or not first_node <= node._sequence_nr() < _LEAF:
            continue
        pending += [following for following, _ in node.next_functions]
        values: list[Any] = []
        for name in _saved_names(node.__class__):
            value = getattr(node, name)
            values += value if isinstance(value, (list, tuple)) else (value,)
        held = [getattr(value, "data", None) for value in values]
        seen[node] = [value for value in held if value is not None]
    return list(seen.items())


@functools.cache
def _saved_names(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
