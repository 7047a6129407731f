"""Apply activation checkpointing to chosen modules (*blocks*) during one attempt.

A block drops its activations after the forward pass and recomputes them in the backward pass. Both
computations must see the same state. The random state, buffers and attributes of the first
computation are therefore restored before the second one, and set back to their newest values after
it. As a result, dropout draws the same mask, and BatchNorm updates its statistics only once. Each
recomputation checks that the block's inputs and weights have not changed. The first attempt that
recomputes a block also compares the outputs of both computations.

``saved_bytes`` chooses the modules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError, checkpoint

from holdfast.memory.oom import find_out_of_memory, is_sticky
from holdfast.memory.tensors import has_storage, tensors_of, versions_of

COMPILED = (
    "torch.compile is used in this process, and what a compiled graph saves is fixed at compile"
    " time; call torch.utils.checkpoint in forward instead, which is compiled too"
)
# The attributes that every nn.Module has.
COMMON_ATTRIBUTES = frozenset(vars(nn.Module()))

# `_fingerprint` processes this many elements at a time, so that their fp64 copy stays small.
_FINGERPRINT_CHUNK = 2**16
# The relative difference allowed between two results from an accelerator, which may sum in a
# different order each time. It is about the relative precision of fp16.
_ACCELERATOR_TOLERANCE = 1e-3


class RecomputeDiffersError(CheckpointError):
    """A block cannot be recomputed, because its second computation differs from the first."""

    def __init__(self, block: nn.Module, why: str) -> None:
        super().__init__(f"a {type(block).__name__} cannot be recomputed: {why}")
        self.block = block
        self.why = why


def may_be_caused_by_recomputing(error: Exception) -> bool:
    """Return whether recomputation may have caused an error, so a retry without it may succeed.

    Autograd's error about in-place changes is one such error: autograd saves the inputs of a
    recomputed block and raises if they were changed.
    """
    return isinstance(error, CheckpointError) or "modified by an inplace operation" in str(error)


@contextlib.contextmanager
def recomputing(
    blocks: Sequence[nn.Module],
    capture: Callable[[], Any],
    restore: Callable[[Any], None],
    *,
    verify: Collection[nn.Module] = (),
) -> Iterator[None]:
    """Recompute the activations of blocks in all backward passes inside the ``with`` block.

    Args:
        blocks: The modules to recompute. Their ``forward`` is replaced until the ``with`` block
            ends.
        capture: A function that returns the current random state.
        restore: A function that restores a random state returned by `capture`.
        verify: The blocks whose recomputed outputs are compared with the original ones.

    Raises:
        RecomputeDiffersError: In a backward pass, if an input of a block was changed in place after
            the forward pass, if a weight was replaced or changed, or if an output differs.
    """
    replaced: list[tuple[nn.Module, bool]] = []
    try:
        for block in blocks:
            had_own_forward = "forward" in vars(block)
            replaced.append((block, had_own_forward))
            forward = _RecomputedForward(block, capture, restore, verify=block in verify)
            block.forward = ReplacedForward(block, forward)
        yield
    finally:
        for block, had_own_forward in replaced:
            replacement = vars(block).pop("forward")
            if had_own_forward:
                block.forward = replacement.__wrapped__


class ReplacedForward:
    """Replaces a module's ``forward``. Copying or pickling it yields the original ``forward``."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, module.forward)
        self._module = module
        self._run = run
        # User code may have set a forward on this instance of the module.
        self._own_forward = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement function instead of the original ``forward``."""
        return self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        if self._own_forward is not None:
            return getattr, (SimpleNamespace(forward=self._own_forward), "forward")
        # When `getattr` runs, the copied module has no attributes yet, so `getattr` returns the
        # ``forward`` method of the module's class.
        return getattr, (self._module, "forward")


class _RecomputedForward:
    """Runs a block's ``forward`` under `torch.utils.checkpoint`."""

    def __init__(
        self,
        block: nn.Module,
        capture: Callable[[], Any],
        restore: Callable[[Any], None],
        *,
        verify: bool,
    ) -> None:
        self._block = block
        self._forward = block.forward
        self._capture = capture
        self._restore = restore
        self._verify = verify

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _can_be_checkpointed():
            return self._forward(*args, **kwargs)
        second_pass = _SecondPass(self._block, self._capture, self._restore)
        forward = functools.partial(self._forward, *args, **kwargs)
        call = _BlockCall(self._block, forward, second_pass, verify=self._verify)

        # Ignore the arguments that `checkpoint` passes to `run`, and use the original ones.
        # `checkpoint` passes saved tensors, and hooks on saved tensors may turn them into different
        # objects. Some modules, such as attention, test whether two of their arguments are the same
        # object.
        def run(*_: Any, **__: Any) -> Any:
            return call.run()

        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), second_pass),
            # A recomputation that stops early returns no outputs, so there is nothing to compare.
            early_stop=not self._verify,
            **kwargs,
        )


def _can_be_checkpointed() -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    # Most `torch.func` transforms do not allow hooks on saved tensors.
    return torch._C._functorch.peek_interpreter_stack() is None


class _BlockCall:
    """One call of a block, which is computed in the forward pass and again in the backward pass.

    Args:
        block: The block.
        forward: The block's ``forward``, with the arguments of this call bound to it.
        second_pass: The context manager that is active during the second computation.
        verify: Whether to compare the outputs of both computations.
    """

    def __init__(
        self,
        block: nn.Module,
        forward: functools.partial[Any],
        second_pass: _SecondPass,
        *,
        verify: bool,
    ) -> None:
        self._block = block
        self._forward = forward
        self._second_pass = second_pass
        self._input_versions = self._versions_of_inputs()
        self._weights = _weights_of(block)
        self._verify = verify
        # A fingerprint of each output of the first computation.
        self._fingerprints: list[torch.Tensor] = []

    def run(self) -> Any:
        """Run the block's forward and return its outputs, with checks if it is recomputed.

        This is the second computation if `second_pass` is active, and the first one otherwise.

        Raises:
            RecomputeDiffersError: If the second computation finds changed inputs or weights, or
                returns different outputs.
        """
        if self._second_pass.is_active:
            outputs = self._compute_again()
        else:
            outputs = self._forward()
        if self._verify:
            self._compare_outputs(outputs)
        return outputs

    def _versions_of_inputs(self) -> list[int]:
        return versions_of(tensors_of((self._forward.args, self._forward.keywords)))

    def _compute_again(self) -> Any:
        if self._versions_of_inputs() != self._input_versions:
            raise RecomputeDiffersError(
                self._block, "its input was changed in place after it was used"
            )
        if _weights_of(self._block) != self._weights:
            raise RecomputeDiffersError(
                self._block, "its weights were replaced or changed after they were used"
            )
        try:
            return self._forward()
        except Exception as error:
            if _shows_a_difference(error):
                raise RecomputeDiffersError(
                    self._block, f"its second computation raised {error!r}"
                ) from error
            raise

    def _compare_outputs(self, outputs: Any) -> None:
        """Compare the fingerprints of the outputs with those of the first computation.

        After the first computation, the fingerprints are only stored.
        """
        fingerprints = [_fingerprint(tensor) for tensor in tensors_of(outputs)]
        for first, second in zip(self._fingerprints, fingerprints, strict=False):
            if not _are_equal(first, second):
                raise RecomputeDiffersError(
                    self._block, "its second computation returned a different result"
                )
        self._fingerprints = fingerprints


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightVersion:
    """Identifies a parameter's values at one point in time.

    Two versions are equal if the parameter was neither replaced nor changed in the meantime.
    """

    # The id of the tensor.
    identity: int
    # Autograd's counter of in-place changes.
    version: int
    # The address of the storage, and the tensor's offset in it; both are 0 for a tensor without a
    # storage of its own. Assigning ``tensor.data`` changes them. Gathering a sharded weight again
    # does not.
    storage: int
    offset: int
    # A reference that keeps the tensor alive, so that no other tensor can get the same id.
    tensor: torch.Tensor = field(compare=False)


def _weights_of(block: nn.Module) -> list[_WeightVersion]:
    """Return the current versions of a block's parameters.

    If the block runs under `torch.func.functional_call`, these are the versions of the tensors that
    replace its parameters.
    """
    weights = []
    for module in block.modules():
        for tensor in module._parameters.values():
            if tensor is not None:
                weights.append(_version_of_weight(tensor))
    return weights


def _version_of_weight(tensor: torch.Tensor) -> _WeightVersion:
    """Return the current version of a parameter."""
    storage = 0
    offset = 0
    if has_storage(tensor):
        storage = tensor.untyped_storage()._cdata
        offset = int(tensor.storage_offset())
    (version,) = versions_of([tensor])
    return _WeightVersion(
        identity=id(tensor), version=version, storage=storage, offset=offset, tensor=tensor
    )


def _shows_a_difference(error: Exception) -> bool:
    """Return whether an error in the second computation shows that it differs from the first."""
    # A CheckpointError comes from a recomputed block nested in this one and already describes that
    # block. torch raises _StopRecomputationError to end a recomputation as soon as it has
    # recomputed all saved tensors.
    if isinstance(error, (CheckpointError, _StopRecomputationError)):
        return False
    return find_out_of_memory(error) is None and not is_sticky(error)


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    tolerance = 0.0
    if first.device.type != "cpu":
        absolute_sum = first[1].nan_to_num()
        tolerance = _ACCELERATOR_TOLERANCE * float(absolute_sum)
    return torch.allclose(first, second, rtol=0.0, atol=tolerance, equal_nan=True)


def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Return two numbers that change if any value changes or if two values are swapped.

    The first number is the sum of the values, weighted by position. The second is the sum of the
    absolute weighted values. The computation does not synchronize the host with the device.

    Returns:
        Shape ``(2,)``, float64, on the device of `values`. Zeros if the tensor is not strided.
    """
    with torch.no_grad():
        fingerprint = torch.zeros(2, dtype=torch.float64, device=values.device)
        real = torch.view_as_real(values) if values.is_complex() else values
        if real.layout != torch.strided:
            return fingerprint
        weights = torch.linspace(
            0.5, 1.5, _FINGERPRINT_CHUNK, dtype=torch.float64, device=values.device
        )
        chunks = torch.split(real.reshape(-1), _FINGERPRINT_CHUNK)
        for number, chunk in enumerate(chunks, start=1):
            weighted = chunk.double() * weights[: len(chunk)]
            weighted_sum = weighted.sum() * (1 + 1 / number)
            fingerprint += torch.stack((weighted_sum, weighted.abs().sum()))
        return fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleState:
    """References to the buffers and attributes of one module, keyed by name."""

    buffers: dict[str, torch.Tensor | None]
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockState:
    """The state that a block's result depends on, in addition to its inputs and weights."""

    random_state: Any
    # The states of the block itself and of each module in it, in the order of ``block.modules()``.
    modules: list[_ModuleState]
    # Each buffer, with a copy of its values.
    buffer_values: list[tuple[torch.Tensor, torch.Tensor]]


class _SecondPass(contextlib.AbstractContextManager[None]):
    """Context manager that gives a block's second computation the same state as the first one.

    That state is captured when this object is created. It is restored on entry, once per backward
    pass, and the newest state is put back on exit. Attributes that each call replaces, such as a
    counter or a hidden state, therefore refer to their earlier objects during the recomputation.
    """

    def __init__(
        self, block: nn.Module, capture: Callable[[], Any], restore: Callable[[Any], None]
    ) -> None:
        self._modules = list(block.modules())
        self._capture = capture
        self._restore = restore
        self._first = self._snapshot()
        self._current = self._first
        self.is_active = False

    def __enter__(self) -> None:
        self._current = self._snapshot()
        self.is_active = True
        self._restore_state(self._first)

    def __exit__(self, *_: object) -> None:
        self._restore_state(self._current)
        self._current = self._first
        self.is_active = False

    def _snapshot(self) -> _BlockState:
        """Return the current random state, buffers and attributes."""
        modules = [
            _ModuleState(buffers=dict(module._buffers), attributes=_own_attributes(module))
            for module in self._modules
        ]
        # Modules may share a buffer, which is then copied only once.
        buffers: dict[int, torch.Tensor] = {}
        for module in modules:
            for buffer in module.buffers.values():
                if buffer is not None:
                    buffers[id(buffer)] = buffer
        return _BlockState(
            random_state=self._capture(),
            modules=modules,
            buffer_values=[(buffer, buffer.clone()) for buffer in buffers.values()],
        )

    def _restore_state(self, state: _BlockState) -> None:
        """Restore a random state, buffers and attributes that `_snapshot` returned."""
        for module, module_state in zip(self._modules, state.modules, strict=True):
            module._buffers.update(module_state.buffers)
            for name in _own_attributes(module).keys() - module_state.attributes.keys():
                del vars(module)[name]
            vars(module).update(module_state.attributes)
        for buffer, values in state.buffer_values:
            # Write through `.data`, so that autograd does not count this write as an in-place
            # change. Otherwise, autograd would reject the running statistics that BatchNorm saved
            # for the backward pass, although that pass does not use them in training mode.
            buffer.data.copy_(values)
        self._restore(state.random_state)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, except ``forward`` and those of every ``nn.Module``."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in COMMON_ATTRIBUTES and name != "forward"
    }
