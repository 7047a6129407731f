"""What a sample holds is looked at whatever it is made of: NaN and Inf are found, two reads are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.loader.inspection import find_nonfinite, first_difference

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|Sparse|quantize|TypedStorage)")


@dataclass
class Spoken:
    wave: Any


def _array(kind: str) -> Callable[[float], Any]:
    return lambda value: np.array([value, 2.0], dtype=kind)


def _record(value: float) -> Any:
    return np.array([(1, value)], dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True))


_FLOATS: dict[str, Callable[[float], Any]] = {
    "sparse": lambda value: (torch.eye(2) * value).to_sparse(),
    "compressed rows": lambda value: (torch.eye(2) * value).to_sparse_csr(),
    "compressed columns": lambda value: (torch.eye(2) * value).to_sparse_csc(),
    "nested": lambda value: torch.nested.nested_tensor([torch.ones(1), torch.full((2,), value)]),
    "8 bits": lambda value: torch.tensor([value]).to(torch.float8_e5m2),
    "conjugate": lambda value: torch.tensor([complex(value, 1)]).conj(),
    "dataclass": lambda value: Spoken([torch.tensor(value)]),
    "complex number": lambda value: complex(1, value),
    "other byte order": _array(">f4"),
    "long double": _array("g"),
    "backwards": lambda value: np.array([value, 2.0])[::-1],
}
_OTHERS: dict[str, Callable[[float], Any]] = {
    "text": lambda value: np.array([str(value), "b"]),
    "dates": lambda value: np.array([int(value), 3], dtype="datetime64[D]"),
    "objects": lambda value: np.array([str(value), None], dtype=object),
    "records": _record,
    "quantised": lambda value: torch.quantize_per_tensor(torch.tensor([value]), 0.1, 0, torch.quint8),
}


@pytest.mark.parametrize("make", [*_FLOATS.values(), *_OTHERS.values()], ids=[*_FLOATS, *_OTHERS])
def test_two_reads_of_anything_are_compared(make: Callable[[float], Any]) -> None:
    """Equal ones do not differ, others do, and no kind of array or tensor is an error."""
    assert first_difference([make(1.0)], [make(1.0)]) is None
    assert first_difference([make(1.0)], [make(3.0)]) is not None


@pytest.mark.parametrize("make", _FLOATS.values(), ids=_FLOATS)
def test_values_that_are_not_finite_are_found_in_anything(make: Callable[[float], Any]) -> None:
    """Wherever floating-point numbers can lie, NaN among them is told and ordinary ones are not."""
    assert find_nonfinite(make(1.0)) is None
    assert "NaN or Inf" in str(find_nonfinite(make(float("nan"))))
    assert first_difference(make(float("nan")), make(float("nan"))) is None


def test_what_cannot_be_looked_into_is_no_fault() -> None:
    """A tensor without values and an object that refuses to be compared are neither bad nor different."""

    class Refuses(str):
        __slots__ = ()

        def __ne__(self, other: object) -> bool:
            raise TypeError("no comparison")

        __hash__ = str.__hash__

    empty = torch.ones(2, device="meta")
    assert find_nonfinite([empty, object(), np.array([None, 1.0], dtype=object)]) is None
    assert first_difference([empty, Refuses("a")], [empty, Refuses("b")]) is None
