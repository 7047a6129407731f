"""Record every operation of a forward and backward pass that returned NaN or Inf.

`OriginTracer` is a context. Inside it, a dispatch mode sees each operation, temporary module hooks
know which module runs, and autograd's sequence numbers tie an operation of the backward pass to the
module and the line of its forward operation. No tensor is kept alive: a `Suspect` holds facts, and
weak references to storages keep their addresses unique. Which suspect is to blame is decided in
``provenance``.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable, Sequence
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
from holdfast.numerics.operands import (
    Operand,
    bad_rows,
    measure,
    nonfinite,
    values_of,
    whole_numbers_of,
)

Kind = Literal["operation", "input", "parameter", "buffer", "constant"]
Pass = Literal["forward", "backward"]
# In place of a module's path, for code that runs in no module.
OUTSIDE = "loss function"

# Arguments that native_batch_norm writes although its schema does not say so.
_UNDECLARED_WRITES = frozenset({"running_mean", "running_var"})
# Operations that return an argument's memory or uninitialized memory, although their schemas do not
# say so. In both cases there is nothing to examine.
_UNDECLARED_VIEWS = ("_unsafe_view", "_reshape_alias", "empty", "new_empty")
# Operations that overwrite their first argument without reading it.
_OVERWRITE_TARGET = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
        "random_",
    }
)

# Files that are not the user's: torch, holdfast, and generated code such as "<string>".
_FOREIGN_PREFIXES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
# The function whose frame waits while autograd runs.
_ENGINE_FUNCTION = "_engine_run_backward"
_CHECKPOINT_FILE = str(Path("torch") / "utils" / "checkpoint.py")
# In the forward pass, a custom Function is looked for in this many frames beyond the user's
# innermost one.
_FRAMES_BEYOND_USER = 6


@dataclass(frozen=True, slots=True)
class BadOperand:
    """A non-finite operand: the suspect that produced it, whether it holds NaN, and whether Inf."""

    suspect: Suspect
    nan: bool
    inf: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where an operation runs."""

    # The path of the module.
    module: str = ""
    # The line of the user's code.
    line: str = ""
    # The recomputation of a checkpointed block counts as forward.
    phase: Pass = "forward"
    # The class of the custom autograd.Function that runs.
    function: str = ""
    # The autograd node that runs, in the backward pass of torch's own operations.
    node: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Suspect:
    """An operation that returned NaN or Inf, or a tensor that already held one."""

    # The order of events; -1 for tensors that existed before the pass.
    index: int
    kind: Kind
    # The operation without namespace and overload, such as "log", or the name of the tensor.
    name: str
    location: Location = Location()
    bad_operands: tuple[BadOperand, ...] = ()
    # All operands, unless one of them held NaN.
    operands: tuple[Operand, ...] = ()
    # The numbers among the arguments.
    scalars: tuple[float, ...] = ()
    produced: Operand
    # Rows along the batch axis in which the output is bad.
    rows: tuple[int, ...] = ()
    # Each output element depends on one element of each operand.
    pointwise: bool = False

    @property
    def took_nan(self) -> bool:
        """Whether an operand held NaN."""
        return any(operand.nan for operand in self.bad_operands)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor that exists before the pass."""

    kind: Kind
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ReadTensor:
    """A tensor argument that an operation reads, and its values before the call."""

    tensor: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class _Arguments:
    """The arguments of an operation."""

    read: list[_ReadTensor] = field(default_factory=list)
    # Tensors that the operation writes.
    written: list[torch.Tensor] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)


class _Operation:
    """The relevant parts of an operator overload's schema."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name.split("::")[-1]
        self.pointwise = torch.Tag.pointwise in func.tags
        self._argument_names = [argument.name for argument in schema.arguments]
        writes = [
            argument
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._written = {argument.name for argument in writes}
        if "batch_norm" in self.name:
            self._written |= _UNDECLARED_WRITES
        self._written_unread = {
            argument.name
            for argument in writes
            if argument.kwarg_only or self.name in _OVERWRITE_TARGET
        }
        # Nothing is written, so what the operation returns is an argument's memory if any.
        is_declared_view = not writes and any(
            returned.alias_info is not None for returned in schema.returns
        )
        self.is_view = is_declared_view or self.name.startswith(_UNDECLARED_VIEWS)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Arguments:
        """Return the arguments of a call, with copies of what it will overwrite."""
        arguments = _Arguments()
        named = [*zip(self._argument_names, args, strict=False), *kwargs.items()]
        for name, argument in named:
            for leaf in _leaves(argument):
                if isinstance(leaf, torch.Tensor):
                    self._add_tensor(arguments, name, leaf)
                elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                    arguments.scalars.append(float(leaf))
        return arguments

    def _add_tensor(self, arguments: _Arguments, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor argument: the values that the operation reads, and those that it writes."""
        values = values_of(tensor)
        if values is None:
            # Integers are recorded too because a count of 0 explains a division.
            counts = whole_numbers_of(tensor)
            if counts is not None:
                arguments.read.append(_ReadTensor(counts, counts))
            return
        is_written = name in self._written
        if is_written:
            arguments.written.append(values)
        if name not in self._written_unread:
            before = values.clone() if is_written else values
            arguments.read.append(_ReadTensor(values, before))


def _leaves(argument: Any) -> Iterable[Any]:
    # Most arguments are not containers, and flattening every one would be slow.
    return tree_leaves(argument) if isinstance(argument, (list, tuple)) else (argument,)


class OriginTracer(TorchDispatchMode):
    """Records the suspects of one forward and backward pass; see ``provenance.trace``.

    Args:
        models: The models by name. Parts of a single model called ``"model"`` keep their bare
            paths.
        tensors: Everything that exists before the pass.
        batch_size: Samples in the batch, or None if unknown.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        tensors: Sequence[NamedTensor],
        batch_size: int | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.suspects: list[Suspect] = []
        # Whether operations ran whose values could not be read.
        self.missed_some = False
        self._paths = _module_paths(models)
        self._batch_size = batch_size
        # The modules whose forward runs, from the outermost.
        self._running: list[nn.Module] = []
        # The location of the forward operation, by the sequence number of its autograd node.
        self._forward_locations: dict[int, Location] = {}
        self._newest_node = -1
        self._operations: dict[Any, _Operation] = {}
        # The suspect that wrote a storage last, by the storage's number.
        self._writers: dict[int, Suspect] = {}
        # As long as these exist, no other storage gets the number of a recorded one.
        self._storages: list[StorageWeakRef] = []
        self._hooks: list[Any] = []
        # Tensors from before the pass, by the number of their storage.
        self._tensors_before: dict[int, list[NamedTensor]] = {}
        for named in tensors:
            values = values_of(named.tensor)
            if values is not None:
                self._tensors_before.setdefault(_storage_of(values), []).append(named)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With True, torch would import its compiler to keep it out of here: 1.5 s of CPU time
        # (torch 2.13).
        return False

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._begin_module),
            register_module_forward_hook(self._end_module, always_call=True),
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

    def _begin_module(self, module: nn.Module, _args: Any) -> None:
        self._running.append(module)

    def _end_module(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # Inner modules whose forward has not ended were left by the exception with which
        # checkpointing stops a recomputation early.
        for depth in range(len(self._running) - 1, -1, -1):
            if self._running[depth] is module:
                del self._running[depth:]
                return

    def _current_path(self) -> str:
        # A module that does not belong to the models has the path of its caller.
        for module in reversed(self._running):
            path = self._paths.get(id(module))
            if path is not None:
                return path
        return OUTSIDE

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_forward_mode():
            # In a dispatch mode, reading a tensor that has a tangent can crash the process.
            self.missed_some = True
            return func(*args, **kwargs)
        operation = self._operations.get(func)
        if operation is None:
            operation = _Operation(func)
            self._operations[func] = operation
        self._note_node()
        if operation.is_view:
            return func(*args, **kwargs)
        arguments = operation.read(args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            self._examine(operation, arguments, result)
        return result

    def _note_node(self) -> None:
        """Record the location of the operation whose autograd node was just created."""
        newest = torch._C._autograd._get_sequence_nr() - 1
        if newest != self._newest_node and newest not in self._forward_locations:
            self._forward_locations[newest] = self._locate()
        self._newest_node = newest

    def _locate(self) -> Location:
        """Return where the current operation runs."""
        node: Any = torch._C._current_autograd_node()
        caller = _find_caller(sys._getframe(2), in_backward=node is not None)
        if node is None:
            return Location(module=self._current_path(), line=caller.line, function=caller.function)
        forward = self._forward_locations.get(node._sequence_nr(), Location())
        if caller.is_recomputing:
            module = self._current_path() if self._running else forward.module
            return Location(module=module, line=caller.line, function=caller.function)
        if caller.line:
            # The user's own Python code runs inside the backward pass.
            return Location(
                module=forward.module, line=caller.line, phase="backward", function=caller.function
            )
        return Location(
            module=forward.module, line=forward.line, phase="backward", node=node.name()
        )

    def _examine(self, operation: _Operation, arguments: _Arguments, result: Any) -> None:
        """Add a suspect if the result of an operation holds NaN or Inf."""
        outputs = _nonfinite_outputs(result, arguments)
        if not outputs:
            return
        # Among several outputs, one that holds NaN is the most informative.
        worst = max(outputs, key=lambda values: bool(torch.isnan(values).any()))
        output_bad = nonfinite(worst)
        assert output_bad is not None
        suspect = Suspect(
            index=len(self.suspects),
            kind="operation",
            name=operation.name,
            location=self._locate(),
            bad_operands=self._bad_operands(
                arguments.read, output_bad if operation.pointwise else None
            ),
            scalars=tuple(arguments.scalars),
            produced=measure(worst),
            pointwise=operation.pointwise,
        )
        if not suspect.took_nan:
            suspect.operands = tuple(measure(operand.values) for operand in arguments.read)
            suspect.rows = bad_rows(output_bad, self._batch_size)
        self.suspects.append(suspect)
        for values in outputs:
            self._set_writer(values, suspect)

    def _set_writer(self, values: torch.Tensor, suspect: Suspect) -> None:
        """Note the suspect that last wrote into the memory of some values."""
        storage = _storage_of(values)
        if storage not in self._writers:
            self._storages.append(StorageWeakRef(values.untyped_storage()))  # type: ignore[no-untyped-call]
        self._writers[storage] = suspect

    def _bad_operands(
        self, operands: Sequence[_ReadTensor], output_bad: torch.Tensor | None
    ) -> tuple[BadOperand, ...]:
        """Return the operands that may be the cause of the bad output.

        Args:
            operands: Those of the operation.
            output_bad: Where the output of a pointwise operation is bad. An operand that is bad
                only at other elements is not to blame. None for other operations.
        """
        bad_operands = []
        for operand in operands:
            values = operand.values
            bad = nonfinite(values)
            if bad is None:
                continue
            if output_bad is not None:
                bad, values, bad_there = torch.broadcast_tensors(bad, values, output_bad)  # type: ignore[no-untyped-call]
                bad = bad & bad_there
            if bool(bad.any()):
                bad_operand = BadOperand(
                    suspect=self.find(operand.tensor),
                    nan=bool((torch.isnan(values) & bad).any()),
                    inf=bool((torch.isinf(values) & bad).any()),
                )
                bad_operands.append(bad_operand)
        return tuple(bad_operands)

    def find(self, tensor: torch.Tensor) -> Suspect:
        """Return the suspect that last wrote NaN or Inf into the memory of a tensor."""
        values = values_of(tensor)
        assert values is not None
        writer = self._writers.get(_storage_of(values))
        if writer is None:
            writer = self._source(values)
            self._set_writer(values, writer)
        return writer

    def _source(self, values: torch.Tensor) -> Suspect:
        """Return a suspect for a tensor that no recorded operation has written."""
        for named in self._tensors_before.get(_storage_of(values), []):
            bad = nonfinite(named.tensor)
            if bad is None:
                continue
            all_values = values_of(named.tensor)
            assert all_values is not None
            return Suspect(
                index=-1,
                kind=named.kind,
                name=named.name,
                produced=measure(all_values),
                rows=bad_rows(bad, self._batch_size) if named.kind == "input" else (),
            )
        return Suspect(index=-1, kind="constant", name="", produced=measure(values))


def _nonfinite_outputs(result: Any, arguments: _Arguments) -> list[torch.Tensor]:
    """Return the values that an operation returned or wrote and that hold NaN or Inf."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    tensors += arguments.written
    outputs = []
    # An operation may return what it has written.
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        values = values_of(tensor)
        if values is not None and nonfinite(values) is not None:
            outputs.append(values)
    return outputs


def _module_paths(models: dict[str, nn.Module]) -> dict[int, str]:
    """Return the path of each module by its id. A shared module keeps its first path."""
    paths: dict[int, str] = {}
    for key, model in models.items():
        for name, module in model.named_modules():
            parts = [part for part in name.split(".") if part not in ("", "_orig_mod")]
            if key != "model" or not parts:
                parts.insert(0, key)
            paths.setdefault(id(module), ".".join(parts))
    return paths


def _storage_of(values: torch.Tensor) -> int:
    """Return the number of a tensor's storage."""
    return int(values.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Caller:
    """The user's code that called an operation."""

    # Such as "model.py:12 in forward"; empty if no line of the user is on the stack.
    line: str
    # The class of the custom autograd.Function whose forward or backward runs.
    function: str
    # A checkpointed block runs its forward again.
    is_recomputing: bool


def _find_caller(frame: FrameType | None, *, in_backward: bool) -> _Caller:
    """Return the innermost frame of the user's code, searched outwards up to autograd's engine."""
    line = ""
    function = ""
    is_recomputing = False
    frames_beyond_user = 0
    while frame is not None and (in_backward or frames_beyond_user <= _FRAMES_BEYOND_USER):
        code = frame.f_code
        if code.co_name == _ENGINE_FUNCTION:
            break
        if code.co_filename.endswith(_CHECKPOINT_FILE):
            is_recomputing = True
        if _is_users_code(code):
            if not line:
                line = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
            if not function:
                function = _autograd_function_of(frame)
        if line:
            frames_beyond_user += 1
        frame = frame.f_back
    return _Caller(line=line, function=function, is_recomputing=is_recomputing)


@functools.lru_cache(maxsize=4096)
def _is_users_code(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith(_FOREIGN_PREFIXES):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file


def _autograd_function_of(frame: FrameType) -> str:
    """Return the class of the custom Function whose forward or backward this frame runs, or ""."""
    code = frame.f_code
    if code.co_name not in ("forward", "backward") or not code.co_argcount:
        return ""
    first_argument = code.co_varnames[0]
    if first_argument == "self":
        return ""
    context = frame.f_locals.get(first_argument)
    if not isinstance(context, FunctionCtx):
        return ""
    return type(context).__name__.removesuffix("Backward")
