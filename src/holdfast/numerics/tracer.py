"""Every operation of a forward and backward pass that returned NaN or Inf, and what it was given.

`OriginTracer` is a context. Inside it, a dispatch mode sees each operation, temporary module hooks
know which module runs, and the autograd sequence number ties an operation of the backward pass to
the module and the line of its forward one. Nothing is kept alive: a `Suspect` holds facts, and weak
references to storages so that their addresses stay unique. Which suspect is to blame is decided in
``provenance``.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.numerics.eager import in_forward_mode
from holdfast.numerics.operands import Operand, bad_rows, measure, nonfinite, values_of

Kind = Literal["operation", "input", "parameter", "buffer", "constant"]
Phase = Literal["forward", "backward"]
OUTSIDE = "loss function"

# Native_batch_norm's schema does not say that it writes them
_WRITTEN_UNSAID = {"running_mean", "running_var"}
_SHARE_UNSAID = ("_unsafe_view", "_reshape_alias", "empty", "new_empty")
_IGNORE_THEIR_TARGET = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "random_",
}

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_STANDARD = sysconfig.get_paths()["stdlib"]
_ENGINE = "_engine_run_backward"  # the frame that waits while autograd runs
_CHECKPOINT = str(Path("torch") / "utils" / "checkpoint.py")
# Frames beyond the innermost one in which a custom Function is looked for in the forward pass
_FURTHER = 6


@dataclass(frozen=True, slots=True)
class Link:
    """A non-finite tensor that an operation was given, and whether it holds NaN, and Inf."""

    suspect: Suspect
    nan: bool
    inf: bool


@dataclass(slots=True, eq=False, kw_only=True)
class Suspect:
    """An operation that returned NaN or Inf, or a tensor that held one before."""

    index: int  # order of events; -1 for tensors that were there before the pass
    kind: Kind
    name: str  # of the operation without namespace and overload ("log"), or of the tensor
    node: str = ""  # autograd node that ran, in the backward pass of torch's own operations
    function: str = ""  # class of the custom autograd.Function that ran
    module: str = ""
    phase: Phase = "forward"  # also in the recomputation of a checkpointed block
    line: str = ""  # the user's code
    links: tuple[Link, ...] = ()  # the non-finite tensors that it was given
    operands: tuple[Operand, ...] = ()  # all that it was given, unless that held NaN
    scalars: tuple[float, ...] = ()  # numbers among its arguments
    produced: Operand
    rows: tuple[int, ...] = ()  # where its output is bad along the batch axis
    pointwise: bool = False  # each output element depends on one element of each operand

    @property
    def took_nan(self) -> bool:
        """Whether an operand held NaN."""
        return any(link.nan for link in self.links)


class _Operation:
    """What the schema of an overload says."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        written = [
            a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        shares = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        self.name: str = schema.name.split("::")[-1]
        # What `empty` returns is rubbish until it is written: nothing to look at either.
        self.is_view = (shares and not written) or self.name.startswith(_SHARE_UNSAID)
        self.pointwise = torch.Tag.pointwise in func.tags
        self._written = {a.name for a in written} | (
            _WRITTEN_UNSAID if "batch_norm" in self.name else set()
        )
        self._only_written = {
            a.name for a in written if a.kwarg_only or self.name in _IGNORE_THEIR_TARGET
        }
        self._arguments = [a.name for a in schema.arguments]

    def read(self, args: Any, kwargs: dict[str, Any]) -> _Arguments:
        """Return what a call is given; what it will overwrite is copied."""
        found = _Arguments()
        for name, argument in [*zip(self._arguments, args, strict=False), *kwargs.items()]:
            for leaf in (
                tree_leaves(argument) if isinstance(argument, (list, tuple)) else (argument,)
            ):
                if isinstance(leaf, torch.Tensor):
                    self._add(found, name, leaf)
                elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                    found.scalars.append(float(leaf))
        return found

    def _add(self, found: _Arguments, name: str, leaf: torch.Tensor) -> None:
        values = values_of(leaf)
        if values is None:
            # A count of 0 explains a division
            if (counts := values_of(leaf, whole_numbers=True)) is not None:
                found.given.append((counts, counts))
            return
        if name in self._written:
            found.written.append(values)
        if name not in self._only_written:
            found.given.append((values, values.clone() if name in self._written else values))


@dataclass(slots=True)
class _Arguments:
    # And its values before the call
    given: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)


class OriginTracer(TorchDispatchMode):
    """Watches one forward and backward pass; `tensors` are those that exist before it.

    See ``provenance.trace``.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        tensors: Sequence[tuple[Kind, str, torch.Tensor]],
        batch_size: int | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.suspects: list[Suspect] = []
        self.missed_some = False
        self._paths = dict(_paths(models))
        self._batch_size = batch_size
        self._running: list[tuple[nn.Module, str]] = []
        # Sequence number -> module and line of the forward operation
        self._nodes: dict[int, tuple[str, str]] = {}
        self._newest_node = -1
        self._operations: dict[Any, _Operation] = {}
        self._newest: dict[int, Suspect] = {}  # that made a storage bad, by its key
        self._storages: list[StorageWeakRef] = []
        self._hooks: list[Any] = []
        self._before: dict[int, list[tuple[Kind, str, torch.Tensor]]] = {}
        for kind, name, tensor in tensors:
            values = values_of(tensor)
            if values is not None:
                self._before.setdefault(_key(values), []).append((kind, name, tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Or torch would import its compiler, 1.5 s of CPU time (torch 2.13), to keep it out of here
        return False

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ends, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _module_begins(self, module: nn.Module, _args: Any) -> None:
        outer = self._running[-1][1] if self._running else OUTSIDE
        self._running.append((module, self._paths.get(id(module), outer)))

    def _module_ends(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # Down to its own frame: what was left by an exception (checkpointing stops recomputation
        # early) goes too.
        for depth in range(len(self._running) - 1, -1, -1):
            if self._running[depth][0] is module:
                del self._running[depth:]
                return

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_forward_mode():
            # Reading a tensor that has a tangent, in a dispatch mode, can kill the process
            self.missed_some = True
            return func(*args, **kwargs)
        operation = self._operations.get(func)
        if operation is None:
            operation = self._operations[func] = _Operation(func)
        self._note_node()
        if operation.is_view:
            return func(*args, **kwargs)
        arguments = operation.read(args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            self._examine(operation, arguments, result)
        return result

    def _note_node(self) -> None:
        """Note the module and line of the operation whose autograd node was made just now."""
        newest = torch._C._autograd._get_sequence_nr() - 1
        if newest != self._newest_node and newest not in self._nodes:
            here = self._where()
            self._nodes[newest] = (here["module"], here["line"])
        self._newest_node = newest

    def _where(self) -> dict[str, Any]:
        """Return module, phase, line, custom function and autograd node of what runs now, as a
        suspect has them.
        """
        node: Any = torch._C._current_autograd_node()
        caller = _find_caller(sys._getframe(2), in_backward=node is not None)
        found = {"line": caller.line, "function": caller.function, "phase": "forward"}
        module = self._running[-1][1] if self._running else OUTSIDE
        if node is None:
            return {**found, "module": module}
        forward_module, forward_line = self._nodes.get(node._sequence_nr(), ("", ""))
        if caller.recomputing:
            return {**found, "module": module if self._running else forward_module}
        found |= {"module": forward_module, "phase": "backward"}
        return (
            found
            if caller.inside_backward
            else found | {"line": forward_line, "function": "", "node": node.name()}
        )

    def _examine(self, operation: _Operation, arguments: _Arguments, result: Any) -> None:
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs = {id(tensor): tensor for tensor in (*made, *arguments.written)}.values()
        found = [
            (values, bad)
            for t in outputs
            if (values := values_of(t)) is not None and (bad := nonfinite(values)) is not None
        ]
        if not found:
            return
        values, bad = max(found, key=lambda pair: bool(torch.isnan(pair[0]).any()))
        links = [
            self._link(tensor, seen, bad if operation.pointwise else None)
            for tensor, seen in arguments.given
        ]
        suspect = Suspect(
            index=len(self.suspects),
            kind="operation",
            name=operation.name,
            links=tuple(link for link in links if link is not None),
            scalars=tuple(arguments.scalars),
            produced=measure(values),
            pointwise=operation.pointwise,
            **self._where(),
        )
        if not suspect.took_nan:
            suspect.operands = tuple(measure(seen) for _, seen in arguments.given)
            suspect.rows = bad_rows(bad, self._batch_size)
        self.suspects.append(suspect)
        for output, _ in found:
            self._blame(output, suspect)

    def _blame(self, values: torch.Tensor, suspect: Suspect) -> Suspect:
        if (key := _key(values)) not in self._newest:
            self._storages.append(StorageWeakRef(values.untyped_storage()))  # type: ignore[no-untyped-call]
        self._newest[key] = suspect
        return suspect

    def _link(
        self, tensor: torch.Tensor, seen: torch.Tensor, output_bad: torch.Tensor | None
    ) -> Link | None:
        """Return the link to an operand, None if it is finite or bad only where a pointwise
        output is not.
        """
        bad = nonfinite(seen)
        if bad is None:
            return None
        if output_bad is not None:
            bad, seen, output_bad = torch.broadcast_tensors(bad, seen, output_bad)  # type: ignore[no-untyped-call]
            bad = bad & output_bad
        if not bool(bad.any()):
            return None
        nan, inf = bool((torch.isnan(seen) & bad).any()), bool((torch.isinf(seen) & bad).any())
        return Link(self.find(tensor), nan, inf)

    def find(self, tensor: torch.Tensor) -> Suspect:
        """Return what made a tensor bad that holds NaN or Inf.

        Of writes into its memory the newest bad one.
        """
        values = values_of(tensor)
        assert values is not None
        known = self._newest.get(_key(values))
        return self._blame(values, self._source(values)) if known is None else known

    def _source(self, values: torch.Tensor) -> Suspect:
        """Return a suspect for a tensor that nothing was seen to write."""
        known = self._before.get(_key(values), [])
        kind, name, tensor = next(
            (entry for entry in known if nonfinite(entry[2]) is not None), (None, "", values)
        )
        whole = values_of(tensor)
        assert whole is not None
        bad = nonfinite(whole) if kind == "input" else None
        rows = () if bad is None else bad_rows(bad, self._batch_size)
        return Suspect(
            index=-1, kind=kind or "constant", name=name, produced=measure(whole), rows=rows
        )


def _paths(models: dict[str, nn.Module]) -> Iterator[tuple[int, str]]:
    seen: set[int] = set()
    for key, model in models.items():
        for name, module in model.named_modules():
            parts = [part for part in name.split(".") if part not in ("", "_orig_mod")]
            if id(module) not in seen:  # a shared module keeps its first name
                seen.add(id(module))
                yield id(module), ".".join(parts if key == "model" and parts else [key, *parts])


def _key(values: torch.Tensor) -> int:
    return int(values.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Caller:
    """Who called an operation."""

    # Such as "model.py:12 in forward"; empty if no line of the user's is on the stack
    line: str = ""
    function: str = ""  # class of the custom autograd.Function whose forward or backward runs
    # Python code runs inside the backward pass, and not only torch's own
    inside_backward: bool = False
    recomputing: bool = False  # a checkpointed block runs its forward again


def _find_caller(frame: FrameType | None, *, in_backward: bool) -> _Caller:
    """Return who called, from a frame outwards to the autograd engine.

    The innermost frame of the user's code.
    """
    line, function, recomputing, inside, beyond = "", "", False, True, 0
    while frame is not None and (in_backward or beyond <= _FURTHER):
        code = frame.f_code
        if code.co_name == _ENGINE:
            inside = inside and bool(line)
            break
        recomputing = recomputing or code.co_filename.endswith(_CHECKPOINT)
        if _is_users(code):
            line = line or f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
            function = function or _function_class(frame)
        beyond += bool(line)
        frame = frame.f_back
    return _Caller(
        line=line, function=function, inside_backward=inside and bool(line), recomputing=recomputing
    )


@functools.lru_cache(maxsize=4096)
def _is_users(code: CodeType) -> bool:
    file = code.co_filename
    return not (
        file.startswith(_FOREIGN) or (file.startswith(_STANDARD) and "site-packages" not in file)
    )


def _function_class(frame: FrameType) -> str:
    code = frame.f_code
    if (
        code.co_name not in ("forward", "backward")
        or not code.co_argcount
        or code.co_varnames[0] == "self"
    ):
        return ""
    context = frame.f_locals.get(code.co_varnames[0])
    return (
        type(context).__name__.removesuffix("Backward") if isinstance(context, FunctionCtx) else ""
    )
