"""Record every operation in a forward and backward pass that returned NaN or Inf.

`OriginTracer` is a dispatch mode that sees each operation while it is active. Temporary module
hooks show which module is running. The sequence numbers of autograd nodes connect an operation in
the backward pass with the module and the line of its forward operation. The tracer keeps no tensor
alive: a `Suspect` contains only statistics, and weak references to storages ensure that their
addresses stay unique.

``provenance`` decides which suspect is the origin.
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
# The value of `Location.module` for operations that run outside all modules.
OUTSIDE = "loss function"

# Arguments that ``native_batch_norm`` writes to, although its schema does not declare that.
_UNDECLARED_WRITES = frozenset({"running_mean", "running_var"})
# Prefixes of operations that return views or uninitialized memory, although their schemas do not
# declare that. Their results need not be examined.
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

# Prefixes of files that are not user code: torch, holdfast, and generated code such as "<string>".
_FOREIGN_PREFIXES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
# The Python function through which torch calls the autograd engine.
_ENGINE_FUNCTION = "_engine_run_backward"
_CHECKPOINT_FILE = str(Path("torch") / "utils" / "checkpoint.py")
# In the forward pass, the search for a custom autograd.Function ends this many frames outside the
# innermost frame of user code.
_FRAMES_BEYOND_USER = 6


@dataclass(frozen=True, slots=True)
class BadOperand:
    """An operand that contains NaN or Inf."""

    # The operation or tensor that produced the operand.
    suspect: Suspect
    # Whether the operand contains NaN.
    nan: bool
    # Whether the operand contains Inf.
    inf: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The place where an operation runs. Strings are empty if unknown or not applicable."""

    # The path of the module.
    module: str = ""
    # The line of user code, such as "model.py:12 in forward".
    line: str = ""
    # The pass. Recomputation of a checkpointed block counts as forward.
    phase: Pass = "forward"
    # The name of the custom autograd.Function that is running.
    function: str = ""
    # The name of the autograd node that is running, if it belongs to one of torch's own operations.
    node: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Suspect:
    """An operation that returned NaN or Inf, or a tensor that contained them before the pass."""

    # Position in the order of suspects; -1 for a tensor that existed before the pass.
    index: int
    kind: Kind
    # The operation without namespace and overload, such as "log", or the name of the tensor.
    name: str
    location: Location = Location()
    # The operands that contain NaN or Inf.
    bad_operands: tuple[BadOperand, ...] = ()
    # All operands. Empty if one of them contains NaN.
    operands: tuple[Operand, ...] = ()
    # The numbers among the arguments of the operation.
    scalars: tuple[float, ...] = ()
    # The result of the operation, or the tensor.
    produced: Operand
    # Rows along the batch axis in which the result contains NaN or Inf.
    rows: tuple[int, ...] = ()
    # Whether each element of the result depends on only one element of each operand.
    pointwise: bool = False

    @property
    def took_nan(self) -> bool:
        """Whether an operand contains NaN."""
        return any(operand.nan for operand in self.bad_operands)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor that exists before the pass, with a name for messages."""

    kind: Kind
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ReadTensor:
    """A tensor argument that an operation reads, with its values before the call."""

    tensor: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class _Arguments:
    """The arguments of one call of an operation, sorted by how the operation uses them."""

    # Tensors that the operation reads.
    read: list[_ReadTensor] = field(default_factory=list)
    # Tensors that the operation writes to.
    written: list[torch.Tensor] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)


class _Operation:
    """The parts of an operator overload's schema that the tracer needs."""

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
        # An operation that writes nothing but returns an alias of an argument is a view.
        is_declared_view = not writes and any(
            returned.alias_info is not None for returned in schema.returns
        )
        self.is_view = is_declared_view or self.name.startswith(_UNDECLARED_VIEWS)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Arguments:
        """Return the arguments of a call. Copy the values that the call is about to overwrite."""
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
        """Add a tensor to the arguments that are read, to those that are written, or to both."""
        values = values_of(tensor)
        if values is None:
            # Integers are recorded too, because a count of 0 may explain a division by 0.
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
    # Flatten only lists and tuples, because flattening every argument would be slow.
    return tree_leaves(argument) if isinstance(argument, (list, tuple)) else (argument,)


class OriginTracer(TorchDispatchMode):
    """A dispatch mode that records the suspects in one forward and backward pass.

    Args:
        models: The models, keyed by name. The paths of modules begin with this name, unless it is
            ``"model"``.
        tensors: Inputs, parameters and buffers, which exist before the pass.
        batch_size: Number of samples in the batch, or None if unknown.

    Attributes:
        suspects: The recorded suspects, in the order in which their operations ran.
        missed_some: Whether some operations could not be examined.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        tensors: Sequence[NamedTensor],
        batch_size: int | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.suspects: list[Suspect] = []
        # Whether some operations could not be examined.
        self.missed_some = False
        self._paths = _module_paths(models)
        self._batch_size = batch_size
        # The modules whose forward method is running, outermost first.
        self._running: list[nn.Module] = []
        # The locations of forward operations, keyed by the sequence number of their autograd node.
        self._forward_locations: dict[int, Location] = {}
        # The sequence number of the newest autograd node.
        self._newest_node = -1
        # The operations seen so far, keyed by their operator overload.
        self._operations: dict[Any, _Operation] = {}
        # The suspect that last wrote to each storage, keyed by the storage's address.
        self._writers: dict[int, Suspect] = {}
        # References to the storages in `_writers`, so that no new storage gets the same address.
        self._storages: list[StorageWeakRef] = []
        self._hooks: list[Any] = []
        # The tensors that exist before the pass, keyed by the address of their storage.
        self._tensors_before: dict[int, list[NamedTensor]] = {}
        for named in tensors:
            values = values_of(named.tensor)
            if values is not None:
                self._tensors_before.setdefault(_storage_of(values), []).append(named)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this returned True, torch would import its compiler in order to exclude the mode from
        # compilation. The import takes 1.5 s of CPU time in torch 2.13.
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
        # Remove the modules inside this one too. They are still in the list if an exception has
        # ended their forward, as activation checkpointing does to end a recomputation early.
        for depth in range(len(self._running) - 1, -1, -1):
            if self._running[depth] is module:
                del self._running[depth:]
                return

    def _current_path(self) -> str:
        # If a module is not part of any model, its operations are attributed to its caller.
        for module in reversed(self._running):
            path = self._paths.get(id(module))
            if path is not None:
                return path
        return OUTSIDE

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_forward_mode():
            # Reading a tensor with a tangent in a dispatch mode can crash the process.
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
        """Record the location of the current operation, if autograd has created a node for it."""
        newest = torch._C._autograd._get_sequence_nr() - 1
        if newest != self._newest_node and newest not in self._forward_locations:
            self._forward_locations[newest] = self._locate()
        self._newest_node = newest

    def _locate(self) -> Location:
        """Return the location of the current operation."""
        node: Any = torch._C._current_autograd_node()
        caller = _find_caller(sys._getframe(2), in_backward=node is not None)
        if node is None:
            return Location(module=self._current_path(), line=caller.line, function=caller.function)
        forward = self._forward_locations.get(node._sequence_nr(), Location())
        if caller.is_recomputing:
            module = self._current_path() if self._running else forward.module
            return Location(module=module, line=caller.line, function=caller.function)
        if caller.line:
            # The backward pass is running the user's Python code.
            return Location(
                module=forward.module, line=caller.line, phase="backward", function=caller.function
            )
        return Location(
            module=forward.module, line=forward.line, phase="backward", node=node.name()
        )

    def _examine(self, operation: _Operation, arguments: _Arguments, result: Any) -> None:
        """Record a suspect if the result of an operation contains NaN or Inf."""
        outputs = _nonfinite_outputs(result, arguments)
        if not outputs:
            return
        # If several outputs contain NaN or Inf, choose one with NaN, which is more informative.
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
        """Record that a suspect was the last to write to a tensor's storage."""
        storage = _storage_of(values)
        if storage not in self._writers:
            self._storages.append(StorageWeakRef(values.untyped_storage()))  # type: ignore[no-untyped-call]
        self._writers[storage] = suspect

    def _bad_operands(
        self, operands: Sequence[_ReadTensor], output_bad: torch.Tensor | None
    ) -> tuple[BadOperand, ...]:
        """Return the operands that may have caused NaN or Inf in an output.

        Args:
            operands: All tensors that the operation reads.
            output_bad: For a pointwise operation, a mask of the NaN and Inf in its output. An
                operand that has NaN or Inf only at other elements is not the cause. None for all
                other operations.
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
        """Return the suspect that last wrote to a tensor's storage; create one if there is none."""
        values = values_of(tensor)
        assert values is not None
        writer = self._writers.get(_storage_of(values))
        if writer is None:
            writer = self._source(values)
            self._set_writer(values, writer)
        return writer

    def _source(self, values: torch.Tensor) -> Suspect:
        """Create a suspect for a tensor with NaN or Inf to which no recorded operation has written.

        It is named after the tensor that existed before the pass in the same storage, if any.
        """
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
    """Return the tensors with NaN or Inf that an operation has returned or written to."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    tensors += arguments.written
    outputs = []
    # Remove duplicates, because an in-place operation returns the tensor that it has written to.
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        values = values_of(tensor)
        if values is not None and nonfinite(values) is not None:
            outputs.append(values)
    return outputs


def _module_paths(models: dict[str, nn.Module]) -> dict[int, str]:
    """Return each module's path, keyed by the module's id. A shared module keeps its first path."""
    paths: dict[int, str] = {}
    for key, model in models.items():
        for name, module in model.named_modules():
            parts = [part for part in name.split(".") if part not in ("", "_orig_mod")]
            if key != "model" or not parts:
                parts.insert(0, key)
            paths.setdefault(id(module), ".".join(parts))
    return paths


def _storage_of(values: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage: the address of its C++ object."""
    return int(values.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Caller:
    """The user code that called an operation."""

    # The line, such as "model.py:12 in forward". Empty if no user code is on the stack.
    line: str
    # The name of the custom autograd.Function whose forward or backward is running, or "".
    function: str
    # Whether activation checkpointing is recomputing the forward pass of a block.
    is_recomputing: bool


def _find_caller(frame: FrameType | None, *, in_backward: bool) -> _Caller:
    """Search the stack for user code, from a frame outward to the call of the autograd engine.

    Args:
        frame: The innermost frame to search.
        in_backward: Whether an autograd node is running. If so, the whole stack up to the engine is
            searched for a custom autograd.Function.
    """
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
    """Return the name of the custom Function whose forward or backward a frame runs, or ""."""
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
