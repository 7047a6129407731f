"""The ledger of samples that are set aside.

Whatever is done to it, its cap holds and its file tells the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import LoaderError
from holdfast.loader.quarantine import FILE_NAME, QuarantineLedger, read_ledger

_FAST = settings(deadline=None, max_examples=60)
_KEYS = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.binary(max_size=3)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
_EPOCHS = st.integers(0, 4)
_EVIDENCE = st.text(st.characters(), max_size=20)  # lone surrogates too: file names may hold them


@st.composite
def _histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Return what is done to a ledger.

    Samples set aside and taken back, and restarts of the run.
    """
    keys = st.sampled_from(draw(st.lists(_KEYS, min_size=1, max_size=5)))
    add = st.tuples(st.just("add"), keys, _EPOCHS, _EVIDENCE)
    release = st.tuples(st.just("release"), st.lists(keys, max_size=3))
    return draw(
        st.lists(st.one_of(add, add, release, st.just(("restart",))), min_size=5, max_size=25)
    )


def _known_as(index: Any) -> Any:
    """Return what a ledger calls an index.

    A file of JSON holds no bytes, which are known by their text.
    """
    if isinstance(index, tuple):
        return tuple(map(_known_as, index))
    return repr(index) if isinstance(index, bytes) else index


def _expected(aside: dict[Any, int], epoch: int) -> set[Any]:
    return {index for index, since in aside.items() if since <= epoch}


@_FAST
@given(_histories(), st.integers(0, 4))
def test_any_history_keeps_to_the_cap_and_to_its_file(
    history: list[tuple[Any, ...]], limit: int
) -> None:
    """The cap holds, a sample counts from its epoch on until it is released, and a restart
    changes nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, FILE_NAME)
        ledger = QuarantineLedger(limit, None, lambda: 1.5)
        ledger.keep_in(path)
        aside: dict[Any, int] = {}
        found: list[Any] = []
        for what, *facts in history:
            if what == "add":
                given_index, epoch, evidence = facts
                index = _known_as(given_index)
                if limit == len(aside) and index not in aside:
                    with pytest.raises(LoaderError, match=r"\[H612\]"):
                        ledger.add(given_index, "raised", epoch, evidence)
                    continue
                news = ledger.add(given_index, "raised", epoch, evidence)
                assert (news is not None) == (aside.get(index, epoch + 1) > epoch)
                if news:
                    aside[index] = epoch
                    found = [each for each in found if each != index] + [index]
            elif what == "release":
                taken = set(map(_known_as, facts[0]))
                assert set(ledger.release(facts[0])) == aside.keys() & taken
                for index in taken:
                    aside.pop(index, None)
            else:
                ledger = QuarantineLedger(limit, None, lambda: 1.5)
                ledger.keep_in(path)
            assert len(ledger) == len(aside) <= limit
            assert all(ledger.bad(epoch) == _expected(aside, epoch) for epoch in range(6))
            assert [entry.index for entry in ledger] == found
            assert list(read_ledger(path).values()) == list(ledger)
