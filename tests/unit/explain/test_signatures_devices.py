"""The signatures of devices tell faults of hardware, of kernels, of builds and of the program apart."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures.devices import SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError") -> str | None:
    """Return the id of the best signature of all for one statement."""
    kind = "exception" if exception else "line"
    found = best_match(Statement(text=text, exception=exception, kind=kind))  # type: ignore[arg-type]
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        assert any(re.search(pattern, text, re.IGNORECASE) for pattern in signature.patterns), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "H914"),
        ("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`", "H911"),
        ("CUDA error: an illegal memory access was encountered", "H913"),
        ("CUDA error: unspecified launch failure", "H913"),
        ("CUDA error: invalid device ordinal", "H1152"),
        ("CUDA error: no kernel image is available for execution on the device", "H1151"),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "H905"),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "H1158"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "H903"),
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`", "H1160"),
        ("Torch not compiled with CUDA enabled", "H917"),
        ("Torch not compiled with XPU enabled", "H1161"),
        ("Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same", "H919"),
    ],
)
def test_neighbours_are_told_apart(text: str, expected: str) -> None:
    """Texts that share most of their words have their own causes."""
    assert cause(text) == expected


def test_faults_of_programs_are_no_faults_of_hardware() -> None:
    """Of the Xid numbers those of faulty kernels do not count as hardware; a lost GPU does."""
    assert cause("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", None) == "H916"
    assert cause("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, MMU Fault: ENGINE GRAPHICS", None) is None
    assert cause("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception", None) is None


def test_types_that_differ_on_one_device_are_no_mix_of_devices() -> None:
    """Half input and float weights on the same GPU are not told as different devices."""
    assert cause("Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor)") != "H919"


@pytest.mark.parametrize(
    "line",
    [
        "using device cuda:0 (8 GPUs visible)",
        "CUDA available: False, training on cpu",
        "ECC errors: corrected 3, uncorrected 0",
        "nvlink status: all links up",
        "device=cuda map_location=cpu",
        "GPU bus id 0000:3b:00.0",
        "all tensors moved to the same device",
    ],
)
def test_talk_of_devices_is_no_failure(line: str) -> None:
    """Lines that people print about devices match none of these signatures."""
    found = [
        signature.id
        for signature in SIGNATURES
        for pattern in signature.patterns
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found
