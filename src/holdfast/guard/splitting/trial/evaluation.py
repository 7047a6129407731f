"""`LossEvaluator`: call a loss function several times from the same state, without side effects.

The checks of a split need this: they call the loss function with a few samples, with parts of them,
and with the same samples again. In `trial_mode`, models are in training mode, except for layers
such as BatchNorm, which compute statistics over the samples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from holdfast.guard.splitting.two_pass import TwoPass
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.states import StateKeeper
from holdfast.loader.random_state import seed_cpu
from holdfast.loader.splitting import Split, copied, tensors_in
from holdfast.memory.oom import find_out_of_memory
from holdfast.memory.tensors import versions_of
from holdfast.numerics.loss import Terms, read_loss, without_graph

# The parts of a set of samples, with the number of samples in each.
Parts: TypeAlias = Sequence[tuple[Any, int]]

# The largest relative difference between gradients that counts as rounding. In fp32, the rounding
# difference between 3 + 1 samples and 4 samples stays below 1e-5, while coupled losses differ by
# 0.01 or more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class LossEvaluator:
    """Calls one loss function with samples, each time from the same state."""

    # The loss function. It receives copies of the batch.
    loss_fn: Callable[[Any], Any]
    # Which dimension of the batch's tensors is the batch dimension.
    split: Split
    # Copies of the states, which are restored before each evaluation.
    states: StateKeeper
    models: Mapping[str, nn.Module]
    # The parameters whose gradients are compared. An evaluation overwrites their ``.grad``, and the
    # check clears it in the end.
    parameters: Sequence[torch.Tensor]
    # Function that returns a context in which to call a loss function.
    calling: Callable[[], contextlib.AbstractContextManager[Any]]
    # Whether that context computes in half precision.
    rounds_to_half: bool
    # Whether this process is a copy that will be discarded, so that side effects are harmless.
    in_a_copy: bool
    # Copies of the buffers, which are restored before each evaluation. None outside `trial_mode`,
    # where buffers are not restored.
    buffers: BufferKeeper | None = None

    # --- properties

    def is_two_pass(self) -> bool:
        """Return whether the loss function computes its loss from the outputs of all samples."""
        return isinstance(self.loss_fn, TwoPass)

    def tolerance(self) -> float:
        """Return the largest relative difference between gradients that counts as rounding."""
        if self.rounds_to_half:
            return _HALF_TOLERANCE
        return min(
            _TOLERANCE.get(parameter.dtype, _HALF_TOLERANCE) for parameter in self.parameters
        )

    def has_exact_fp32(self) -> bool:
        """Return whether matrix products are computed in full fp32 precision or better.

        TF32 on accelerators and half precision round by more.
        """
        return not self.devices() and self.tolerance() != _HALF_TOLERANCE

    def devices(self) -> list[torch.device]:
        """Return the accelerators that hold parameters."""
        devices = {parameter.device for parameter in self.parameters}
        return sorted((device for device in devices if device.type != "cpu"), key=str)

    def trainable_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that may receive gradients."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    # --- gradients

    def gradient_norm(self) -> float:
        """Return the L2 norm of all gradients together, computed in at least fp32."""
        gradients = [p.grad.to_dense() for p in self.parameters if p.grad is not None]
        if not gradients:
            return 0.0
        norms = []
        for gradient in gradients:
            wide = gradient if gradient.dtype in _TOLERANCE else gradient.float()
            norms.append(torch.linalg.vector_norm(wide).double().cpu())
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def negate_gradients(self) -> None:
        """Negate all gradients, so that accumulating other gradients gives the difference."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = -parameter.grad

    def clear_gradients(self) -> None:
        """Remove all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    # --- evaluations

    def restore_start(self, seed: int) -> None:
        """Restore the state from which every evaluation starts.

        Args:
            seed: The seed for the random numbers of the evaluation.
        """
        self.states.restore()
        if self.buffers is not None:
            self.buffers.restore()
        seed_cpu(seed)

    def call(self, function: Callable[[Any], Any], samples: Any) -> Any:
        """Call a function with a copy of some samples, in the context for a loss function."""
        with self.calling():
            return function(copied(samples))

    def terms(
        self, samples: Any, num_samples: int, *, needs_graph: bool = True
    ) -> tuple[Terms, bool]:
        """Call the loss function with a copy of some samples, from the current state.

        Returns:
            The terms of the loss, and whether the loss function has changed the copy.
        """
        copy = copied(samples)
        tensors = tensors_in(copy)
        versions = versions_of(tensors)
        with self.calling():
            terms = read_loss(self.loss_fn(copy), num_samples, needs_graph=needs_graph)
        return terms, versions_of(tensors) != versions

    def terms_from_start(self, samples: Any) -> Terms | None:
        """Restore the start and call the loss function once, without comparing anything.

        Returns:
            The terms of the loss, or None if the call runs out of memory.
        """
        self.restore_start(seed=0)
        try:
            # In a forked copy, the loss function runs with gradients, as in training, since some
            # loss functions change state only then.
            if self.in_a_copy:
                with torch.enable_grad():
                    loss = self.call(self.loss_fn, samples)
            else:
                loss = without_graph(lambda: self.call(self.loss_fn, samples))
            return read_loss(loss, None, needs_graph=False)
        except Exception as error:
            if find_out_of_memory(error) is None:
                raise
            return None

    def loss_from_start(self, samples: Any) -> float:
        """Return the loss as `terms_from_start` does, or NaN if the call runs out of memory."""
        terms = self.terms_from_start(samples)
        return math.nan if terms is None else float(terms.total().detach())


@contextlib.contextmanager
def trial_mode(evaluator: LossEvaluator) -> Iterator[LossEvaluator]:
    """Return a context for comparisons, in training mode except for layers that mix samples.

    The context's value is an evaluator that also restores the buffers. Buffers and states are
    restored on exit.
    """
    buffers = BufferKeeper(dict(evaluator.models))
    buffers.capture()
    evaluator = replace(evaluator, buffers=buffers)
    math_attention: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if evaluator.devices():
        # Fused attention kernels generate dropout masks inside the kernel, where they cannot be
        # recorded.
        math_attention = sdpa_kernel(SDPBackend.MATH)
    try:
        with (
            in_evaluation_mode(evaluator.models.values(), mixing_layers),
            math_attention,
            torch.enable_grad(),
        ):
            yield evaluator
    finally:
        evaluator.restore_start(seed=0)


@contextlib.contextmanager
def in_evaluation_mode(
    models: Iterable[nn.Module], select_modules: Callable[[nn.Module], Iterable[nn.Module]]
) -> Iterator[None]:
    """Return a context with some modules in evaluation mode, and no dropout in recurrent layers.

    The random numbers in recurrent layers cannot be repeated for parts. Recurrent layers stay in
    training mode, since cuDNN does not support their backward pass in evaluation mode.

    Args:
        models: The models whose modules are changed inside the context.
        select_modules: Function that returns the modules of a model to put into evaluation mode.
    """
    models = list(models)
    modes = {module: module.training for model in models for module in select_modules(model)}
    modules = [module for model in models for module in model.modules()]
    dropout = {module: module.dropout for module in modules if isinstance(module, nn.RNNBase)}
    try:
        for module in modes:
            is_recurrent = module in dropout
            module.training = is_recurrent
        for module in dropout:
            module.dropout = 0.0
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, rate in dropout.items():
            module.dropout = rate


def mixing_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that, in their current mode, compute statistics over the samples."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _NormBase)
        and module.training
        and (isinstance(module, _BatchNorm) or module.track_running_stats)
    ]
