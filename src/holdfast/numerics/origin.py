"""Births of NaN and Inf: every operation of a forward and backward pass that returned one, and what it was given.

`Births` is a context. Inside it, a dispatch mode sees each operation, temporary module hooks know which module runs,
and the autograd sequence number ties an operation of the backward pass to the module and the line of its forward one.
Nothing is kept alive: a birth holds facts, and weak references to storages so that their addresses stay unique.

Which birth is to blame is decided in ``provenance``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.numerics.eager import in_forward_mode
from holdfast.numerics.frames import Caller, find_caller
from holdfast.numerics.operands import (
    Operand,
    Places,
    bad_rows,
    find_places,
    measure,
    nonfinite,
    values_of,
)
from holdfast.numerics.operations import Given, Traits, read_arguments, read_traits

Kind = Literal["operation", "input", "parameter", "buffer", "constant"]
Phase = Literal["forward", "backward"]
OUTSIDE = "loss function"

_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_sequence_number: Callable[[], int] | None = getattr(torch._C._autograd, "_get_sequence_nr", None)


@dataclass(frozen=True, slots=True)
class Link:
    """A non-finite tensor that an operation was given.

    Args:
        birth: Where the tensor came from.
        nan: Whether it holds NaN.
        inf: Whether it holds Inf.
    """

    birth: Birth
    nan: bool
    inf: bool


@dataclass(slots=True, eq=False, kw_only=True)
class Birth:
    """An operation that returned NaN or Inf, or a tensor that held one before.

    Args:
        index: Order of events; -1 for tensors that were there before the pass.
        kind: What it is.
        name: Of the operation without namespace and overload (``"log"``), or of the tensor.
        node: Name of the autograd node that ran, in the backward pass of torch's own operations.
        function: Class of the custom ``autograd.Function`` that ran.
        module: Path of the module.
        phase: Forward or backward; recomputation of a checkpointed block is forward.
        line: The user's code.
        links: The non-finite tensors that it was given.
        operands: What it was given, if it may be to blame.
        scalars: Numbers among its arguments.
        produced: Its output.
        rows: Where its output is bad along the batch axis.
        pointwise: Whether each output element depends on one element of each operand.
    """

    index: int
    kind: Kind
    name: str
    node: str = ""
    function: str = ""
    module: str = ""
    phase: Phase = "forward"
    line: str = ""
    links: tuple[Link, ...] = ()
    operands: tuple[Operand, ...] = ()
    scalars: tuple[float, ...] = ()
    produced: Operand
    rows: tuple[int, ...] = ()
    pointwise: bool = False

    @property
    def took_nan(self) -> bool:
        """Whether an operand held NaN."""
        return any(link.nan for link in self.links)


class Births(TorchDispatchMode):
    """Watches one forward and backward pass.

    Args:
        models: By name; the parts of a single one called ``"model"`` keep their bare paths.
        tensors: ``(kind, name, tensor)`` of everything that exists before the pass.
        batch_size: Length of the batch axis, if there is one.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        tensors: Sequence[tuple[Kind, str, torch.Tensor]],
        batch_size: int | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Birth] = []
        self.missed_some = False
        self._paths = dict(_paths(models))
        self._batch_size = batch_size
        self._running: list[tuple[nn.Module, str]] = []
        self._nodes: dict[int, tuple[str, str]] = {}  # sequence number -> module and line of the forward operation
        self._newest_node = -1
        self._traits: dict[Any, Traits] = {}
        self._by_storage: dict[int, list[tuple[Birth, Places | None]]] = {}
        self._storages: list[StorageWeakRef] = []
        self._hooks: list[Any] = []
        self._sources: dict[int, list[tuple[Kind, str, torch.Tensor]]] = {}
        for kind, name, tensor in tensors:
            values = values_of(tensor)
            if values is not None:
                self._sources.setdefault(_key(values), []).append((kind, name, tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler, 1.5 s of CPU time (torch 2.13), to keep it out of here

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ends, always_call=True),
        ]
        try:
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._remove_hooks()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_hooks()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _module_begins(self, module: nn.Module, _args: Any) -> None:
        outer = self._running[-1][1] if self._running else OUTSIDE
        self._running.append((module, self._paths.get(id(module), outer)))

    def _module_ends(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # Down to its own frame: what was left by an exception (checkpointing stops recomputation early) goes too.
        for depth in range(len(self._running) - 1, -1, -1):
            if self._running[depth][0] is module:
                del self._running[depth:]
                return

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_forward_mode():
            self.missed_some = True  # reading a tensor that has a tangent, in a dispatch mode, can kill the process
            return func(*args, **kwargs)
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = read_traits(func)
        self._note_node()
        if traits.view:
            return func(*args, **kwargs)
        given, written, scalars = read_arguments(traits, args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            self._examine(traits, given, written, result, scalars)
        return result

    def _note_node(self) -> None:
        """Note the module and line of the operation whose autograd node was made just now."""
        if _sequence_number is None:
            return
        newest = _sequence_number() - 1
        if newest != self._newest_node and newest not in self._nodes:
            module, _, caller, _ = self._where()
            self._nodes[newest] = (module, caller.line)
        self._newest_node = newest

    def _where(self) -> tuple[str, Phase, Caller, str]:
        """Return module, phase, calling line and autograd node of what runs now."""
        node = _current_node()
        caller = find_caller(sys._getframe(2), in_backward=node is not None)
        module = self._running[-1][1] if self._running else OUTSIDE
        if node is None:
            return module, "forward", caller, ""
        number = node._sequence_nr() if hasattr(node, "_sequence_nr") else -1
        noted = self._nodes.get(number, ("", ""))
        if caller.recomputing:
            return (self._running[-1][1] if self._running else noted[0]), "forward", caller, ""
        if not caller.inside_backward:
            caller = Caller(line=noted[1])
        return noted[0], "backward", caller, "" if caller.inside_backward else node.name()

    def _examine(
        self,
        traits: Traits,
        given: list[Given],
        written: list[torch.Tensor],
        result: Any,
        scalars: tuple[float, ...],
    ) -> None:
        outputs = _distinct([*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)), *written])
        found = [(values, bad) for values in outputs if (bad := nonfinite(values)) is not None]
        if not found:
            return
        for operand in given:
            operand.bad = nonfinite(operand.seen)
        values, bad = max(found, key=lambda pair: bool(torch.isnan(pair[0]).any()))
        links = tuple(
            self._link(operand, bad if traits.pointwise else None) for operand in given if operand.bad is not None
        )
        birth = self._birth(traits, given, values, bad, tuple(link for link in links if link is not None))
        birth.scalars = scalars
        self.events.append(birth)
        for output, where in found:
            partial = any(output is tensor for tensor in written)  # fresh memory has one writer only
            self._births_in(output).append((birth, find_places(output, where) if partial else None))

    def _birth(
        self, traits: Traits, given: list[Given], values: torch.Tensor, bad: torch.Tensor, links: tuple[Link, ...]
    ) -> Birth:
        module, phase, caller, node = self._where()
        birth = Birth(
            index=len(self.events),
            kind="operation",
            name=traits.name,
            node=node,
            function=caller.function,
            module=module,
            phase=phase,
            line=caller.line,
            links=links,
            produced=measure(values),
            pointwise=traits.pointwise,
        )
        if not birth.took_nan:
            birth.operands = tuple(measure(operand.seen) for operand in given)
            birth.rows = bad_rows(bad, self._batch_size)
        return birth

    def _births_in(self, values: torch.Tensor) -> list[tuple[Birth, Places | None]]:
        key = _key(values)
        if key not in self._by_storage:
            self._storages.append(StorageWeakRef(values.untyped_storage()))  # type: ignore[no-untyped-call]
        return self._by_storage.setdefault(key, [])

    def _link(self, operand: Given, output_bad: torch.Tensor | None) -> Link | None:
        """Return the link to a bad operand, None if it is bad only where a pointwise output is not."""
        bad, seen = operand.bad, operand.seen
        assert bad is not None
        if output_bad is not None:
            bad, seen, output_bad = torch.broadcast_tensors(bad, seen, output_bad)  # type: ignore[no-untyped-call]
            bad = bad & output_bad
        if not bool(bad.any()):
            return None
        born = self.find(operand.tensor, operand.bad)
        return Link(born, bool((torch.isnan(seen) & bad).any()), bool((torch.isinf(seen) & bad).any()))

    def find(self, tensor: torch.Tensor, bad: torch.Tensor | None = None) -> Birth:
        """Return what made a tensor bad.

        Args:
            tensor: Holds NaN or Inf.
            bad: Where, shape as the tensor; None: look.
        """
        values = values_of(tensor)
        assert values is not None
        where = nonfinite(values) if bad is None else bad
        assert where is not None
        births = self._births_in(values)
        if len(births) == 1 and births[0][1] is None:
            return births[0][0]
        places = find_places(values, where)
        for birth, written in reversed(births):
            if written is None or written.meet(places):
                return birth
        source = self._source(values)
        births.insert(0, (source, None))
        return source

    def _source(self, values: torch.Tensor) -> Birth:
        """Return a birth for a tensor that nobody was seen to write."""
        key = _key(values)
        known = self._sources.get(key, [])
        kind, name, tensor = next((entry for entry in known if nonfinite(entry[2]) is not None), (None, "", values))
        whole = values_of(tensor)
        assert whole is not None
        bad = nonfinite(whole) if kind == "input" else None
        return Birth(
            index=-1,
            kind=kind or "constant",
            name=name,
            produced=measure(whole),
            rows=() if bad is None else bad_rows(bad, self._batch_size),
        )


def _paths(models: dict[str, nn.Module]) -> Iterator[tuple[int, str]]:
    seen: set[int] = set()
    for key, model in models.items():
        for name, module in model.named_modules():
            inner = ".".join(part for part in name.split(".") if part not in ("", "_orig_mod"))
            path = inner if key == "model" and inner else ".".join(part for part in (key, inner) if part)
            if id(module) not in seen:  # a shared module keeps its first name
                seen.add(id(module))
                yield id(module), path


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        values = values_of(tensor)
        if values is not None:
            found[id(tensor)] = values
    return list(found.values())


def _key(values: torch.Tensor) -> int:
    return int(values.untyped_storage()._cdata)
