"""The modules of a job that could be recomputed, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.memory.recompute import find_repeated_blocks


def find_blocks(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules that could be recomputed: repeated blocks, or else the children that have parameters."""
    found: list[tuple[str, nn.Module]] = []
    for prefix, model in models.items():
        children = [(name, child) for name, child in model.named_children() if any(True for _ in child.parameters())]
        blocks = find_repeated_blocks(model) or children
        found += [(".".join(filter(None, (prefix, name))), block) for name, block in blocks]
    return found


def modules_named(names: Sequence[str], models: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return modules by the names that `find_blocks` gives (H412 for a name that no module has)."""
    known = {
        ".".join(filter(None, (prefix, name))): module
        for prefix, model in models.items()
        for name, module in model.named_modules()
    }
    for name in names:
        if name not in known:
            raise PolicyError(
                f"recompute={name!r}",
                limit="the models have no module of that name",
                fix=did_you_mean(name, known, otherwise="name a module of the model."),
                rule="H412",
            )
    return [known[name] for name in names]
