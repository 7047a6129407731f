"""Find the modules of a model whose activations can be recomputed, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from holdfast.core.errors import PolicyError, did_you_mean


def named_submodules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return every module inside the models (not the models themselves), each under its first name.

    Names are prefixed by the model's key, except those of the model called ``"model"``.
    """
    named: dict[int, tuple[str, nn.Module]] = {}
    for key, model in models.items():
        for name, module in model.named_modules():
            if name:
                named.setdefault(id(module), (_full_name(key, name), module))
    return dict(named.values())


def find_blocks(
    models: Mapping[str, nn.Module], names: Sequence[str]
) -> list[tuple[str, nn.Module]]:
    """Return the modules with these names, named as in `named_submodules`.

    Raises:
        PolicyError: H102 for a name that no module has.
    """
    modules = {
        _full_name(key, name): module
        for key, model in models.items()
        for name, module in model.named_modules()
    }
    for name in names:
        if name not in modules:
            raise PolicyError(
                f"recompute names {name!r}, which is not a module of any model",
                limit="only the activations of a module can be recomputed",
                fix=did_you_mean(
                    name, modules, otherwise="pass names as named_modules() returns them."
                ),
                rule="H102",
            )
    return [(name, modules[name]) for name in names]


def find_repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of a model, by name: transformer layers, residual blocks.

    A block is repeated if at least two modules of its kind have the same parent. Of nested
    candidates the outermost is returned. ``Sequential`` modules are of one kind if they hold the
    same layers, unless there are repeated blocks inside them. Single layers, such as a convolution,
    do not count: their activations are the inputs of their neighbours, which are kept in any case.
    """
    names: dict[int, str] = {}
    blocks: dict[int, nn.Module] = {}
    for name, block in _repeated_blocks(model, prefix=""):
        # A shared block counts once, under its first name.
        names.setdefault(id(block), name)
        blocks.setdefault(id(block), block)
    return [(names[key], block) for key, block in blocks.items()]


def _full_name(key: str, name: str) -> str:
    return name if key == "model" else f"{key}.{name}"


def _repeated_blocks(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost repeated blocks below a module, by name."""
    children = list(parent.named_children())
    kinds = [_kind_of(child) for _, child in children]
    for (name, child), kind in zip(children, kinds, strict=True):
        is_repeated = kind is not None and kinds.count(kind) >= 2
        if is_repeated and _has_parameters(child):
            yield prefix + name, child
        else:
            yield from _repeated_blocks(child, f"{prefix}{name}.")


def _kind_of(module: nn.Module) -> tuple[type, ...] | None:
    """Return a key that all blocks of the same kind share, or None if the module is not a block."""
    if isinstance(module, nn.Sequential):
        if any(_repeated_blocks(module, prefix="")):
            return None
        return tuple(type(layer) for layer in module.modules())
    has_children = next(module.children(), None) is not None
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not has_children:
        return None
    return (type(module),)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
