"""The catalogue of devices.

Every figure with its source, names as people write them, sizes, clear errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.core.errors import PolicyError
from holdfast.forecast.devices import catalogue as devices
from holdfast.forecast.devices.catalogue import GIB, find_device
from holdfast.forecast.trace.events import DTYPES

CATALOGUE = yaml.safe_load((Path(devices.__file__).parent / "devices.yaml").read_text())
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


@pytest.mark.parametrize("entry", CATALOGUE["devices"], ids=lambda entry: str(entry["name"]))
def test_every_figure_has_a_source(entry: dict[str, Any]) -> None:
    """Each device says where usable memory, context and rates are from, and its figures are of a
    plausible order.
    """
    device = find_device(entry["name"])
    assert {"usable", "context", "rates", "cublas", "cublaslt"} <= device.sources.keys()
    assert all(len(text) > 10 for text in device.sources.values())
    assert 0.88 * GIB * entry["total_gib"] < device.usable_bytes < GIB * entry["total_gib"]
    assert 0.1 * GIB < device.context_bytes < GIB
    assert device.available_bytes == device.usable_bytes - device.context_bytes
    assert 2e11 < device.bandwidth < 1e13
    assert set(device.flops) <= set(DTYPES)
    rates = [device.flops_per_second(dtype) for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16")]
    assert rates == sorted(rates) or device.capability < (8, 0)


def test_names_as_people_and_torch_write_them() -> None:
    """Case, spaces, dashes and the vendor's words do not matter."""
    assert find_device("NVIDIA GeForce RTX 4090").name == "RTX 4090"
    assert find_device("NVIDIA A100-SXM4-80GB").name == "A100-80GB"
    assert find_device("NVIDIA H100 80GB HBM3").name == "H100-SXM"


def test_sizes() -> None:
    """A size stands for all that processes can have."""
    unknown = find_device("24GiB")
    assert (unknown.name, unknown.usable_bytes) == ("24GiB", 24 * GIB)
    assert "nearest" in unknown.sources["rates"]
    assert all(find_device(f"{size}GiB").capability >= (8, 0) for size in (14, 16, 32, 64, 192))
    assert find_device("16GiB").context_bytes == find_device("24GiB").context_bytes > 0.5 * GIB
    assert find_device("24GB").usable_bytes == 24 * 10**9
    assert find_device("16384 MiB").usable_bytes == 16 * GIB


@pytest.mark.parametrize(("text", "said"), REFUSED["devices"])
def test_an_unknown_device(text: str, said: str) -> None:
    """The error names the known devices, or what a size looks like, and the rule H416."""
    with pytest.raises(PolicyError, match=said) as caught:
        find_device(text)
    assert caught.value.rule == "H416"
