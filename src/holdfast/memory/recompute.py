"""Activation checkpointing of repeated blocks, switched on for one attempt only.

A block forgets its activations and computes them again in the backward pass. The second time it must see what
the first one saw: random state and buffers are put back before it and set forward again after it, so BatchNorm's
statistics move once and dropout draws the same mask.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdfast.core.errors import PolicyError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Autograd keeps their output, which the next layer keeps as its input, and nothing of their own.
_KEEP_NO_MORE = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Flatten)
NO_BLOCKS = (
    "the models have no blocks that repeat and keep more than what their neighbours keep anyway; "
    "Policy(recompute=[...]) takes modules by name"
)
Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]


def find_repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules that occur at least twice, of one class, under one parent.

    Such as the layers of a transformer or the blocks of a residual network; also ``Sequential`` of the same layers
    each, unless there are such blocks in them. Single layers (a convolution) do not count, nor a single layer with
    its ReLU: their activations are their neighbours' inputs, and stay anyway.

    Returns:
        ``(name, module)`` pairs in the order of the model.
    """
    found = {id(block): (name, block) for name, block in reversed(list(_search(model, "")))}
    return list(reversed(found.values()))  # a block that is shared counts once, under its first name


def find_blocks(models: Mapping[str, nn.Module], *, wanted: bool | Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the blocks to recompute, by name; those of a model called ``"model"`` go without that name.

    Args:
        models: By name.
        wanted: Whether any; or the names of the modules.

    Raises:
        PolicyError: H102, for a name that no module has.
    """
    if isinstance(wanted, bool):
        repeated = ((key, find_repeated_blocks(model)) for key, model in models.items() if wanted)
        return [(_full_name(key, name), block) for key, blocks in repeated for name, block in blocks]
    every = {_full_name(key, name): part for key, model in models.items() for name, part in model.named_modules()}
    for name in wanted:
        if name not in every:
            near = difflib.get_close_matches(name, every, n=3)
            raise PolicyError(
                f"recompute names {name!r}, which is no module of the models",
                limit="activations are those of a module",
                fix=f"the nearest names are {', '.join(near)}."
                if near
                else "pass names as named_modules() has them.",
                rule="H102",
            )
    return [(name, every[name]) for name in wanted]


def _full_name(key: str, name: str) -> str:
    return name if key == "model" else f"{key}.{name}"


def _search(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = list(parent.named_children())
    kinds = [_kind(child) for _, child in children]
    for (name, child), kind in zip(children, kinds, strict=True):
        if kind is not None and kinds.count(kind) >= 2 and any(True for _ in child.parameters()):
            yield prefix + name, child
        else:
            yield from _search(child, f"{prefix}{name}.")


def _kind(module: nn.Module) -> tuple[type, ...] | None:
    """Return what makes two modules blocks of one kind; None for one that is no block."""
    if not isinstance(module, _CONTAINERS):
        return (type(module),) if any(True for _ in module.children()) else None
    layers = [part for part in module.modules() if not any(True for _ in part.children())]
    keep_more = sum(not isinstance(layer, _KEEP_NO_MORE) for layer in layers) >= 2
    is_block = isinstance(module, nn.Sequential) and keep_more and not any(_search(module, ""))
    return tuple(type(part) for part in module.modules()) if is_block else None


@contextlib.contextmanager
def recomputing(
    blocks: Sequence[nn.Module], capture: Callable[[], Any], restore: Callable[[Any], None]
) -> Iterator[None]:
    """Checkpoint the activations of these blocks while the context lasts.

    Args:
        blocks: Modules whose ``forward`` is replaced for the time being.
        capture: Returns the random state of the process.
        restore: Puts it back.
    """
    replaced: list[tuple[nn.Module, bool]] = []
    try:
        for block in blocks:
            replaced.append((block, "forward" in vars(block)))
            block.forward = _checkpointed(block, block.forward, capture, restore)
        yield
    finally:
        for block, own in replaced:
            wrapper = vars(block).pop("forward")
            if own:
                block.forward = wrapper.__wrapped__


def _checkpointed(
    block: nn.Module, forward: Callable[..., Any], capture: Callable[[], Any], restore: Callable[[Any], None]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        again = _SeenAgain(list(block.buffers()), capture, restore)

        def contexts() -> Contexts:
            return contextlib.nullcontext(), again

        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )

    run.__wrapped__ = forward  # type: ignore[attr-defined]
    return run


class _SeenAgain(contextlib.AbstractContextManager[None]):
    """Random state and buffers as they are now, put back while a context lasts: once for each backward pass.

    Args:
        buffers: Of the block.
        capture: Returns the random state of the process.
        restore: Puts it back.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], capture: Callable[[], Any], restore: Callable[[Any], None]
    ) -> None:
        self._buffers, self._capture, self._restore = buffers, capture, restore
        self._seen = self._now = self._look()

    def _look(self) -> tuple[Any, list[torch.Tensor]]:
        return self._capture(), [buffer.clone() for buffer in self._buffers]

    def _put_back(self, random_state: Any, values: Sequence[torch.Tensor]) -> None:
        overwrite(self._buffers, values)
        self._restore(random_state)

    def __enter__(self) -> None:
        self._now = self._look()
        self._put_back(*self._seen)

    def __exit__(self, *_: object) -> None:
        self._put_back(*self._now)
        self._now = self._seen


def overwrite(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values into tensors without telling autograd.

    A bumped version counter would make backward refuse BatchNorm's saved running statistics, which it does
    not read in training mode.
    """
    for target, value in zip(targets, values, strict=True):
        target.data.copy_(value)
