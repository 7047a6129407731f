"""How gradients flow through a model, in few numbers: the summary of all layers that goes into an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN = 12


def flow_summary(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what an observer knows of gradients and updates, small enough for an event.

    Args:
        facts: From ``Observer.facts``.

    Returns:
        ``gradient_norm``: middle of the observed norms, by optimizer. ``profile``: root mean square of the gradient's
        elements of at most 12 matrices, spread from the input to the output. ``update_to_weight``: for the smallest
        and the largest, the parameter and the length of a step over the length of the weights (about 1e-3 is usual).
        ``dead_units`` and ``saturated``: shares by module, above a tenth only. None if no layer was observed.
    """
    layers = {name: layer for name, layer in facts["layers"].items() if layer["with_gradient"]}
    if not layers:
        return None
    matrices = [(name, layer["gradient_rms"]) for name, layer in layers.items() if layer["dims"] > 1]
    stride = max(1, -(-len(matrices) // _SHOWN))
    ratios = sorted((layer["ratio"], name) for name, layer in layers.items() if layer["ratio"] is not None)
    dead = {name: shares[-1] for name, shares in facts["dead_units"].items() if shares and shares[-1] > 0.1}
    return {
        "layers": len(layers),
        "gradient_norm": {
            name: sorted(norms)[len(norms) // 2]
            for name, optimizer in facts["optimizers"].items()
            if (norms := optimizer["gradient_norms"])
        },
        "profile": dict(matrices[::stride]),
        "update_to_weight": {name: ratio for ratio, name in (*ratios[:1], *ratios[1:][-1:])},
        "dead_units": dict(list(dead.items())[:_SHOWN]),
        "saturated": {name: share for name, share in list(facts["saturated"].items())[:_SHOWN] if share > 0.1},
    }
