"""oneDNN: its way to say out of memory, and when it is switched off."""

from __future__ import annotations

import pytest
import torch

from holdfast.memory.onednn import is_onednn_failure, switch_off_if_broken, switch_off_if_unsafe


def test_a_healthy_onednn_stays_on() -> None:
    """The trial neither switches oneDNN off nor draws random numbers, however often it is made."""
    before = torch.get_rng_state()
    assert [switch_off_if_broken() for _ in range(3)] == [False, False, False]
    assert torch._C._get_mkldnn_enabled() == torch.backends.mkldnn.is_available()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("model", "is_unsafe"),
    [
        (torch.nn.Conv2d(1, 1, 4, stride=(1, 2)), True),
        (torch.nn.ConvTranspose1d(1, 1, 4, stride=2), True),
        (torch.nn.Conv2d(1, 1, 3, padding=1), False),
        (torch.nn.MaxPool2d(2, stride=2), False),
    ],
)
def test_it_is_switched_off_for_strided_convolutions_only(model: torch.nn.Module, is_unsafe: bool) -> None:
    """Wherever in the models it lies, once; all else keeps oneDNN's kernels, and so its bits."""
    models = [torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Sequential(model))]
    try:
        assert [switch_off_if_unsafe(models) for _ in range(2)] == [is_unsafe, False]
        assert torch._C._get_mkldnn_enabled() is not is_unsafe
    finally:
        torch.backends.mkldnn.set_flags(True)


@pytest.mark.parametrize(
    ("text", "is_failure"),
    [
        ("could not create a primitive", True),
        ("could not create a primitive descriptor for a convolution forward propagation primitive", True),
        ("Could not execute a primitive", True),
        ("could not create an engine primitive", True),
        ("could not initialize a memory object", True),
        ("could not create a file", False),
        ("could not open a primitive", False),
        ("", False),
    ],
)
def test_its_texts_are_told_apart(text: str, is_failure: bool) -> None:
    """Only the texts of oneDNN's own failures count, in any case."""
    assert is_onednn_failure(text) is is_failure
    assert is_onednn_failure(text.upper()) is is_failure
