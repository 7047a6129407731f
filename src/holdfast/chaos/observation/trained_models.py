"""Compute digests of the training state: the models' weights and buffers, and the optimizers."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

from holdfast.chaos.observation.digests import DigestMaker
from holdfast.chaos.trace import ModelState, SavedState

# A sample of the weights is used to find the nearest of several states. It consists of the first
# few values of each of the first few parameters. This is enough, because a step changes nearly all
# weights.
SAMPLED_PARAMETERS = 8
NUMBERS_PER_PARAMETER = 4


class TrainedModels:
    """Tracks the optimizers of a process and the models that they train.

    Args:
        torch: The torch module that the script has imported.
        digests: The object that computes digests.
    """

    def __init__(self, torch: Any, digests: DigestMaker) -> None:
        self._torch = torch
        self._digests = digests
        # Weak references to all optimizers that were created, including those created before a
        # fork.
        self._created: list[Any] = []
        self.restart()

    def restart(self) -> None:
        """Forget which optimizers have stepped. This method is called in a newly forked process."""
        # Weak references to the root modules of each optimizer that has stepped, by the optimizer's
        # ``id()``, in the order in which the optimizers first stepped.
        self._roots: dict[int, list[Any]] = {}
        # Weak references to these optimizers, in the same order.
        self._stepped: list[Any] = []
        # The digest of each root module's buffers before its first call, by the module's ``id()``.
        # The start state of an attempt is compared, and a call may change the buffers.
        self._initial_buffers: dict[int, str] = {}

    def add_optimizer(self, optimizer: Any) -> list[Any]:
        """Register a new optimizer and return the root modules that it trains."""
        self._created.append(weakref.ref(optimizer))
        return find_root_modules(self._torch, optimizer)

    def note_call(self, module: Any) -> None:
        """Record a root module's buffers just before its first call. Later calls are ignored."""
        if id(module) not in self._initial_buffers:
            self._initial_buffers[id(module)] = self._digests.tensors(module.named_buffers())

    def has_stepped(self, optimizer: Any) -> bool:
        """Return whether an optimizer has already stepped in this process."""
        return id(optimizer) in self._roots

    def state_before_first_step(self, optimizer: Any) -> ModelState:
        """Return the state of an optimizer and its models just before the optimizer's first step.

        From then on, the optimizer counts as one that has stepped.
        """
        roots, parameters = self._trained_by(optimizer)
        buffers = [self._initial_buffers.get(id(root)) for root in roots]
        self._stepped.append(weakref.ref(optimizer))
        state = self._model_state(roots, parameters, buffers)
        digests = self._digests.optimizer(optimizer)
        return replace(state, optimizer=digests["optimizer"], parameters=digests["parameters"])

    def state(self, optimizer: Any) -> ModelState:
        """Return the state of the models that an optimizer trains, without the optimizer state."""
        roots, parameters = self._trained_by(optimizer)
        return self._model_state(roots, parameters, self._buffers(roots))

    def weights(self, optimizer: Any) -> str:
        """Return the digest of the weights that an optimizer trains."""
        _, parameters = self._trained_by(optimizer)
        return self._digests.tensors(parameters)

    def index(self, optimizer: Any) -> int:
        """Return the index of an optimizer in the order in which optimizers first stepped."""
        return list(self._roots).index(id(optimizer))

    def saved_states(self) -> list[SavedState | None]:
        """Return the state of each optimizer that has stepped, or None for a deleted optimizer."""
        states: list[SavedState | None] = []
        for reference in self._stepped:
            optimizer = reference()
            if optimizer is None:
                states.append(None)
                continue
            buffers = self._buffers(self._root_modules(optimizer))
            states.append(SavedState(buffers=buffers, **self._digests.optimizer(optimizer)))
        return states

    def _buffers(self, roots: list[Any]) -> list[str | None]:
        return [self._digests.tensors(root.named_buffers()) for root in roots]

    def _model_state(
        self,
        roots: list[Any],
        parameters: list[tuple[str, Any]],
        buffers: list[str | None],
    ) -> ModelState:
        """Return the state of the models with the given root modules.

        Args:
            roots: The root modules; empty if the script has no modules.
            parameters: The trained parameters, with their names.
            buffers: The digest of each root module's buffers; None if unknown.
        """
        sample: list[float] = []
        for _, parameter in parameters[:SAMPLED_PARAMETERS]:
            sample += first_numbers(parameter)
        identities = [id(root) for root in roots]
        if not roots:
            identities = [id(parameter) for _, parameter in parameters]
        return ModelState(
            weights=self._digests.tensors(parameters),
            buffers=buffers,
            sample=sample,
            structure=f"{[type(root).__name__ for root in roots]} {len(parameters)}",
            roots=identities,
        )

    def _trained_by(self, optimizer: Any) -> tuple[list[Any], list[tuple[str, Any]]]:
        """Return the root modules that an optimizer trains, and their named trained parameters.

        Parameters that no optimizer trains are excluded, because they may change after the step, as
        a moving average of the weights does. If the script has no modules, the optimizer's own
        parameters are returned, named by their positions.
        """
        roots = self._root_modules(optimizer)
        trained = self._trained_parameters()
        parameters = [
            (f"{number}.{name}", parameter)
            for number, root in enumerate(roots)
            for name, parameter in root.named_parameters()
            if id(parameter) in trained
        ]
        if not parameters:
            parameters = [
                (f"{position:04}", parameter)
                for group in optimizer.param_groups
                for position, parameter in enumerate(group["params"])
            ]
        return roots, parameters

    def _root_modules(self, optimizer: Any) -> list[Any]:
        """Return an optimizer's root modules. Search again if a stored module no longer exists."""
        references = self._roots.get(id(optimizer))
        if references is not None:
            roots = [reference() for reference in references]
            if None not in roots:
                return roots
        roots = find_root_modules(self._torch, optimizer)
        self._roots[id(optimizer)] = [weakref.ref(root) for root in roots]
        return roots

    def _trained_parameters(self) -> set[int]:
        """Return the ``id()`` of each parameter of all optimizers that still exist."""
        return {
            id(parameter)
            for reference in self._created
            for group in getattr(reference(), "param_groups", ())
            for parameter in group["params"]
        }


def find_root_modules(torch: Any, optimizer: Any) -> list[Any]:
    """Return the outermost modules that contain a parameter of an optimizer, in a stable order.

    The modules are found among all objects that the garbage collector tracks.
    """
    modules = [
        candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.nn.Module)
    ]
    # Do not call `module.children()`, which fails while a module's constructor is still running.
    inner = {
        id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()
    }
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    roots = []
    for module in modules:
        if id(module) in inner or "_parameters" not in module.__dict__:
            continue
        if any(id(parameter) in wanted for parameter in module.parameters()):
            roots.append(module)
    # Sort by names, because the order of the garbage collector's objects differs between runs.
    return sorted(
        roots,
        key=lambda root: (type(root).__name__, [name for name, _ in root.named_parameters()]),
    )


def first_numbers(parameter: Any) -> list[float]:
    """Return the first few values of a parameter, or of its local shard if it is a `DTensor`."""
    local = getattr(parameter, "_local_tensor", parameter)
    flat = local.detach().reshape(-1)
    numbers: list[float] = flat[:NUMBERS_PER_PARAMETER].double().tolist()
    return numbers
