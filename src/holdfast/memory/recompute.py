"""Activation checkpointing of some modules, switched on for one attempt only.

A block forgets its activations and computes them again in the backward pass. The second time it
must see what the first one saw: random state, buffers and attributes are put back before it and set
forward again after it, so BatchNorm's statistics move once and dropout draws the same mask. Whether
its result is the same is compared once, whether its inputs and weights are in each call.

Does not: choose the modules (see ``saved_bytes``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError, checkpoint

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.memory.oom import find_out_of_memory, is_sticky

COMPILED = (
    "torch.compile is at work in this process, and a compiled graph keeps what it was compiled to"
    " keep; torch.utils.checkpoint in forward is compiled with it"
)
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What torch keeps in every module."""
_PRINTED = 2**16  # values at a time
# Buffers and attributes of a module
_Bound: TypeAlias = tuple[dict[str, torch.Tensor | None], dict[str, Any]]
_Copied: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # a buffer, and its values
_Seen: TypeAlias = tuple[Any, list[_Bound], list[_Copied]]
_Weight: TypeAlias = tuple[
    torch.Tensor, int, int, int
]  # with its counter of in-place changes, and where its values are
Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]


def find_repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules that occur at least twice, of one class, under one parent, by
    name.

    Such as the layers of a transformer or the blocks of a residual network; also ``Sequential`` of
    the same layers each, unless there are such blocks in them. Single layers (a convolution) do not
    count: their activations are their neighbours' inputs, and stay anyway.
    """
    found = {id(block): (name, block) for name, block in reversed(list(_search(model, "")))}
    # A block that is shared counts once, under its first name
    return list(reversed(found.values()))


def parts_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return all modules but the models, by name, each once.

    Those of a model called ``"model"`` go without it.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for key, model in models.items():
        for name, part in model.named_modules():
            if name:
                found.setdefault(id(part), (_full_name(key, name), part))
    return dict(found.values())


def find_blocks(
    models: Mapping[str, nn.Module], wanted: Sequence[str]
) -> list[tuple[str, nn.Module]]:
    """Return the modules with these names; those of a model called ``"model"`` go without it."""
    every = {
        _full_name(key, name): part
        for key, model in models.items()
        for name, part in model.named_modules()
    }
    for name in wanted:
        if name not in every:
            raise PolicyError(
                f"recompute names {name!r}, which is no module of the models",
                limit="activations are those of a module",
                fix=did_you_mean(name, every, otherwise="pass names as named_modules() has them."),
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
    if isinstance(module, nn.Sequential):
        return None if any(_search(module, "")) else tuple(type(part) for part in module.modules())
    is_block = not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(
        True for _ in module.children()
    )
    return (type(module),) if is_block else None


class RecomputeDiffersError(CheckpointError):
    """A block has computed something else the second time: which one, and what shows it."""

    def __init__(self, block: nn.Module, why: str) -> None:
        super().__init__(f"a {type(block).__name__} cannot be recomputed: {why}")
        self.block, self.why = block, why


def may_come_of_recomputing(error: Exception) -> bool:
    """Say whether an error may come of recomputing alone.

    Autograd keeps the inputs of a block, and looks at them.
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
    """Checkpoint the activations of these blocks while the context lasts.

    The outputs of some are compared.

    The backward pass raises `RecomputeDiffersError` where an input was changed in place since, the
    block has other weights by then, or an output that is compared is another one the second time.
    """
    replaced: list[tuple[nn.Module, bool]] = []
    try:
        for block in blocks:
            replaced.append((block, "forward" in vars(block)))
            block.forward = _checkpointed(
                block, block.forward, capture, restore, verify=block in verify
            )
        yield
    finally:
        for block, own in replaced:
            wrapper = vars(block).pop("forward")
            if own:
                block.forward = wrapper.__wrapped__


class ReplacedForward:
    """A forward that a module has for the time being.

    A copy of the module, also a pickled one, has the plain one.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, module.forward)
        self._module, self._run, self._own = module, run, vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run what stands in for the forward."""
        return self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        # While a module is copied its copy has no attributes yet: its forward is that of the class.
        return getattr, (
            self._module if self._own is None else SimpleNamespace(forward=self._own),
            "forward",
        )


def _checkpointed(
    block: nn.Module,
    forward: Callable[..., Any],
    capture: Callable[[], Any],
    restore: Callable[[Any], None],
    *,
    verify: bool,
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Most transforms have no hooks on saved tensors
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return forward(*args, **kwargs)
        again = _SeenAgain(block, capture, restore)
        versions = versions_of(tensors_of((args, kwargs)))
        prints: list[torch.Tensor] = []
        weights = _weights_of(block)

        def compared(*args: Any, **kwargs: Any) -> Any:
            if again.is_active and versions_of(tensors_of((args, kwargs))) != versions:
                raise RecomputeDiffersError(
                    block, "its input was changed in place after it was used"
                )
            if again.is_active and not _are_same(weights, _weights_of(block)):
                raise RecomputeDiffersError(
                    block, "its weights were exchanged or changed after they were used"
                )
            try:
                result = forward(*args, **kwargs)
            except Exception as error:
                if again.is_active and _comes_of_the_second_time(error):
                    raise RecomputeDiffersError(
                        block, f"the second time it raises {error!r}"
                    ) from error
                raise
            if verify:
                prints[:] = _compared(
                    block, prints, [_fingerprint(each) for each in tensors_of(result)]
                )
            return result

        def contexts() -> Contexts:
            return contextlib.nullcontext(), again

        # Its own arguments: those that autograd has kept for it are other objects where hooks on
        # saved tensors are active, and a block may ask whether two are one, as attention does.
        return checkpoint(
            lambda *_, **__: compared(*args, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            early_stop=not verify,  # a pass that is stopped early has no outputs
            **kwargs,
        )

    return ReplacedForward(block, run)


def _comes_of_the_second_time(error: Exception) -> bool:
    """Say whether what a block raises the second time shows that it sees something else.

    Not if memory is short.
    """
    # A block in it; torch has what it needs
    if isinstance(error, (CheckpointError, _StopRecomputationError)):
        return False
    return find_out_of_memory(error) is None and not is_sticky(error)


def _compared(
    block: nn.Module, first: list[torch.Tensor], second: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the fingerprints of the second time, after comparing them with those of the first,
    if there are any.
    """
    for one, other in zip(first, second, strict=False):
        # An accelerator may add in another order each time; rounding of fp16 is 1e-3.
        tolerance = 0.0 if one.device.type == "cpu" else 1e-3 * float(one[1].nan_to_num())
        if not torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True):
            raise RecomputeDiffersError(block, "it computes another result the second time")
    return second


def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Return two numbers that differ if a value does, or two change places.

    Float64, shape ``(2,)``, no host sync.
    """
    with torch.no_grad():
        flat = torch.view_as_real(values) if values.is_complex() else values
        found = torch.zeros(2, dtype=torch.float64, device=values.device)
        if flat.layout != torch.strided:
            return found
        weights = torch.linspace(0.5, 1.5, _PRINTED, dtype=torch.float64, device=values.device)
        # In parts: memory is short
        for number, part in enumerate(torch.split(flat.reshape(-1), _PRINTED), start=1):
            wide = part.double() * weights[: len(part)]
            found += torch.stack((wide.sum() * (1 + 1 / number), wide.abs().sum()))
        return found


class _SeenAgain(contextlib.AbstractContextManager[None]):
    """Random state, buffers and attributes of a block as they are now, put back while a context
    lasts.

    Once for each backward pass. Attributes are put back as they were bound: a counter, a replaced
    hidden state.
    """

    def __init__(
        self, block: nn.Module, capture: Callable[[], Any], restore: Callable[[Any], None]
    ) -> None:
        self._parts, self._capture, self._restore = list(block.modules()), capture, restore
        self._seen = self._now = self._look()
        self.is_active = False

    def _look(self) -> _Seen:
        bound = [(dict(part._buffers), _attributes(part)) for part in self._parts]
        buffers = {
            id(each): each for kept, _ in bound for each in kept.values() if each is not None
        }
        return self._capture(), bound, [(each, each.clone()) for each in buffers.values()]

    def _put_back(
        self, random_state: Any, bound: Sequence[_Bound], values: Sequence[_Copied]
    ) -> None:
        for part, (buffers, attributes) in zip(self._parts, bound, strict=True):
            part._buffers.update(buffers)
            for name in _attributes(part).keys() - attributes.keys():
                del vars(part)[name]
            vars(part).update(attributes)
        for buffer, value in values:
            # Unseen by autograd: it would refuse BatchNorm's saved statistics, which it does not
            # read in training.
            buffer.data.copy_(value)
        self._restore(random_state)

    def __enter__(self) -> None:
        self._now, self.is_active = self._look(), True
        self._put_back(*self._seen)

    def __exit__(self, *_: object) -> None:
        self._put_back(*self._now)
        self._now, self.is_active = self._seen, False


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OWN_ATTRIBUTES and name != "forward"
    }


def _weights_of(block: nn.Module) -> list[_Weight]:
    """Return the parameters that a block has now, or what stands in for them
    (`torch.func.functional_call`).

    The storage of their values shows ``tensor.data = ...``, and is the same where a sharded weight
    is gathered once more; it is 0 for a tensor that has no single one.
    """
    found = [
        each for part in block.modules() for each in part._parameters.values() if each is not None
    ]
    return [(each, versions_of([each])[0], *_place_of(each)) for each in found]


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    return (
        (tensor.untyped_storage()._cdata, int(tensor.storage_offset()))
        if has_storage(tensor)
        else (0, 0)
    )


def _are_same(one: Sequence[_Weight], other: Sequence[_Weight]) -> bool:
    """Say whether weights are the same tensors, at the same place, not changed in place since."""
    return len(one) == len(other) and all(
        a is b and rest == now for (a, *rest), (b, *now) in zip(one, other, strict=True)
    )


def has_storage(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has one storage.

    Not if it is sparse, a subclass, or wrapped by `torch.func`.
    """
    plain = tensor.layout == torch.strided and type(tensor) in (
        torch.Tensor,
        nn.Parameter,
        nn.Buffer,
    )
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (tuple, list)):
        inner = value
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, each.name) for each in dataclasses.fields(value)]
    for each in inner:
        yield from tensors_of(each)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return autograd's counters of in-place changes; -1 for a tensor that does not count."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
