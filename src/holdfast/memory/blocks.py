"""Find the modules in a model whose activations can be recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from holdfast.core.errors import PolicyError, did_you_mean


def named_submodules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return all submodules of the models, keyed by name. A shared module keeps its first name.

    Each name is prefixed with the model's key, unless that key is ``"model"``.
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
    """Look up modules by name and return ``(name, module)`` pairs in the order of `names`.

    Args:
        models: Models by key.
        names: Module names in the format of `named_submodules`.

    Raises:
        PolicyError: H102 if no module has one of the names.
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
                limit="recompute takes the names of modules whose activations are recomputed",
                fix=did_you_mean(
                    name, modules, otherwise="pass names as named_modules() returns them."
                ),
                rule="H102",
            )
    return [(name, modules[name]) for name in names]


def find_repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of a model's repeated blocks, such as transformer layers.

    A block is repeated if its parent has at least two children of the same kind. If repeated blocks
    are nested, only the outermost ones are returned. Modules are of the same kind if they have the
    same class. Two ``Sequential`` modules are of the same kind if they contain the same layer
    classes in the same order; a ``Sequential`` that contains repeated blocks is not itself a block.
    A single layer, such as a convolution, is not a block: recomputing it saves nothing, because its
    activations are the inputs of the next layer.
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
    """Yield the name and module of each outermost repeated block inside `parent`."""
    children = list(parent.named_children())
    kinds = [_kind_of(child) for _, child in children]
    for (name, child), kind in zip(children, kinds, strict=True):
        is_repeated = kind is not None and kinds.count(kind) >= 2
        if is_repeated and _has_parameters(child):
            yield prefix + name, child
        else:
            yield from _repeated_blocks(child, f"{prefix}{name}.")


def _kind_of(module: nn.Module) -> tuple[type, ...] | None:
    """Return a key that is equal for blocks of the same kind, or None for a non-block."""
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
