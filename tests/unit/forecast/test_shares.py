"""What is told of who owns a peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.unit.forecast.made_steps import Layer, make_step

from holdfast.forecast.trace.shares import shares_of


def test_repeated_modules_are_added_up_below_the_top_level() -> None:
    """Numbers within a path are left out, and those of a model that is a mere sequence tell its parts apart."""
    trace = make_step([(Layer("linear", 4000),)], 4)
    names = ("", "0", "1.layers.0", "1.layers.1", "encoder.2.linear", "encoder.3.linear")
    module = np.arange(len(trace.size_bytes), dtype=np.int32) % len(names)
    found = shares_of(replace(trace, modules=names, module=module), "foreach").modules
    assert set(found) <= {"0", "1.layers.*", "encoder.*.linear"}
    assert "1.layers.*" in found
    assert "*" not in found
