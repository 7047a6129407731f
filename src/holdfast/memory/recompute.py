"""Activation checkpointing of chosen modules, for one attempt only.

A block drops its activations after the forward pass and computes them again in the backward pass.
The second computation must see what the first one saw: random state, buffers and attributes are
restored before it and advanced again after it, so BatchNorm's statistics are updated once and
dropout draws the same mask. Inputs and weights are compared in every call; the outputs are compared
in the first attempt that recomputes a block.

The modules are chosen in ``saved_bytes``.
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
    "torch.compile is used in this process, and a compiled graph keeps what it was compiled to"
    " keep; torch.utils.checkpoint in forward is compiled with it"
)
# The attributes that torch itself keeps in every module.
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))

# Values of a tensor that are fingerprinted at a time, so that the fp64 copy stays small.
_FINGERPRINT_CHUNK = 2**16
# An accelerator may sum in a different order each time. fp16 rounds to about 1e-3.
_ACCELERATOR_TOLERANCE = 1e-3


class RecomputeDiffersError(CheckpointError):
    """Recomputing a block gave a different result."""

    def __init__(self, block: nn.Module, why: str) -> None:
        super().__init__(f"a {type(block).__name__} cannot be recomputed: {why}")
        self.block = block
        self.why = why


def may_be_caused_by_recomputing(error: Exception) -> bool:
    """Return whether an error might not have occurred without recomputation.

    Autograd keeps the inputs of a recomputed block and checks that they were not changed in place.
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
    """Recompute the activations of these blocks in backward passes within the context.

    Args:
        blocks: Modules whose ``forward`` is replaced within the context.
        capture: Returns the current random state, to be passed to `restore`.
        restore: Restores a random state.
        verify: The blocks whose recomputed outputs are compared with the original ones.

    Raises:
        RecomputeDiffersError: In the backward pass, if a block's input was changed in place after
            it was used, its weights were replaced or changed, or a compared output differs.
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
    """A replacement for a module's ``forward`` that copies and pickles as the original."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, module.forward)
        self._module = module
        self._run = run
        # The caller may have set a forward on the module itself.
        self._own_forward = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement."""
        return self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        if self._own_forward is not None:
            return getattr, (SimpleNamespace(forward=self._own_forward), "forward")
        # The copy of the module has no attributes yet, so this finds the forward of its class.
        return getattr, (self._module, "forward")


class _RecomputedForward:
    """A block's ``forward`` under `torch.utils.checkpoint`."""

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

        # `checkpoint` passes the arguments that autograd kept. With hooks on saved tensors these
        # are not the original objects, but a block may test whether two of its arguments are the
        # same object, as attention does. So the call uses the original ones.
        def run(*_: Any, **__: Any) -> Any:
            return call.run()

        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), second_pass),
            # A recomputation that was stopped early has no outputs to compare.
            early_stop=not self._verify,
            **kwargs,
        )


def _can_be_checkpointed() -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    # Most `torch.func` transforms do not allow hooks on saved tensors.
    return torch._C._functorch.peek_interpreter_stack() is None


class _BlockCall:
    """One call of a block, which is computed twice.

    Args:
        block: The block.
        forward: Its ``forward`` with the arguments of this call.
        second_pass: Whether the second computation runs.
        verify: Whether the outputs of both computations are compared.
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
        # One fingerprint per output of the first computation.
        self._fingerprints: list[torch.Tensor] = []

    def run(self) -> Any:
        """Compute the block for the first or the second time.

        Raises:
            RecomputeDiffersError: The second computation has other inputs, weights or outputs.
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
                    self._block, f"its second computation raises {error!r}"
                ) from error
            raise

    def _compare_outputs(self, outputs: Any) -> None:
        """Compare the outputs with the fingerprints of the first computation, if there are any."""
        fingerprints = [_fingerprint(tensor) for tensor in tensors_of(outputs)]
        for first, second in zip(self._fingerprints, fingerprints, strict=False):
            if not _are_equal(first, second):
                raise RecomputeDiffersError(
                    self._block, "its second computation gives a different result"
                )
        self._fingerprints = fingerprints


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightVersion:
    """Identifies the values of a parameter at one moment.

    Two versions are equal if the parameter was neither replaced nor changed in between.
    """

    identity: int
    version: int
    # Address of the values. It changes with ``tensor.data = ...``, and stays the same if a sharded
    # weight is gathered again. Zeros for a tensor without a single storage.
    storage: int
    offset: int
    # Kept alive, so that no other tensor gets its identity.
    tensor: torch.Tensor = field(compare=False)


def _weights_of(block: nn.Module) -> list[_WeightVersion]:
    """Return a block's current parameters, or the tensors that `functional_call` put there."""
    weights = []
    for module in block.modules():
        for tensor in module._parameters.values():
            if tensor is not None:
                weights.append(_version_of_weight(tensor))
    return weights


def _version_of_weight(tensor: torch.Tensor) -> _WeightVersion:
    """Return what identifies the current values of a parameter."""
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
    """Return whether an error of the second computation shows that its inputs were different."""
    # The first is raised by a block inside this one. The second is how torch stops a recomputation
    # as soon as it has all tensors that it needs.
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
    """Return two numbers that change if a value changes or two values change places.

    The first is a sum weighted by position, the second the same of absolute values.

    Returns:
        Shape ``(2,)``, float64, on the device of `values`; zeros for a tensor that is not strided.
        No host sync.
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
    """The buffers and attributes of one module, by name: the objects themselves, not copies."""

    buffers: dict[str, torch.Tensor | None]
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockState:
    """What a computation of a block depends on, besides its inputs and weights."""

    random_state: Any
    modules: list[_ModuleState]
    # Each buffer with a copy of its values.
    buffer_values: list[tuple[torch.Tensor, torch.Tensor]]


class _SecondPass(contextlib.AbstractContextManager[None]):
    """Restores, within the context, the state that a block had in its first computation.

    It is entered once in each backward pass. Attributes, such as a counter or a hidden state that
    each call replaces, are bound to their earlier objects again.
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
        self._put_back(self._first)

    def __exit__(self, *_: object) -> None:
        self._put_back(self._current)
        self._current = self._first
        self.is_active = False

    def _snapshot(self) -> _BlockState:
        """Copy the state that the block may change: random state, buffers, attributes."""
        modules = [
            _ModuleState(buffers=dict(module._buffers), attributes=_own_attributes(module))
            for module in self._modules
        ]
        # Modules may share a buffer.
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

    def _put_back(self, state: _BlockState) -> None:
        """Restore a snapshot."""
        for module, module_state in zip(self._modules, state.modules, strict=True):
            module._buffers.update(module_state.buffers)
            for name in _own_attributes(module).keys() - module_state.attributes.keys():
                del vars(module)[name]
            vars(module).update(module_state.attributes)
        for buffer, values in state.buffer_values:
            # Through `.data`, so that autograd does not count it: it would refuse the statistics
            # that BatchNorm saved, although it does not read them in training.
            buffer.data.copy_(values)
        self._restore(state.random_state)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module has in addition to those of every ``nn.Module``."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OWN_ATTRIBUTES and name != "forward"
    }
