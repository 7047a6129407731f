"""The order in which a bare loop adds up gradient norms: that of the model's parameters, not of optimizer groups.

``clip_grad_norm_(model.parameters(), ...)`` takes the norm of the norms in that order. With parameters in several
groups, such as those with and without weight decay, another order gives another last bit, and so another run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.numerics.gradients import Group
from holdfast.run.parts import Parts


class ModelOrder:
    """Knows the order for the groups of a step.

    Args:
        parts: Whose models count.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._positions: dict[int, int] | None = None
        self._known: dict[tuple[int, ...], torch.Tensor | None] = {}

    def of(self, groups: Sequence[Group], device: torch.device) -> torch.Tensor | None:
        """Return where in the groups the parameters lie, in the model's order; None if they lie in that order.

        Args:
            groups: As inspected.
            device: Of their norms.

        Cost: that of a look-up by the sizes of the groups, after the first time; parameters that get a gradient
        now and then, as many as before, may be added up in the order of then.
        """
        key = tuple(len(group.parameters) for group in groups)
        if len(key) < 2:
            return None
        if key not in self._known:
            if self._positions is None:
                self._positions = {id(p): at for at, (_, p) in enumerate(self._parts.named_parameters())}
            found = self._positions
            places = [found.get(id(p), len(found)) for group in groups for p in group.parameters]
            order = sorted(range(len(places)), key=places.__getitem__)
            is_same = order == list(range(len(order)))
            self._known[key] = None if is_same else torch.tensor(order, device=device)
        return self._known[key]
