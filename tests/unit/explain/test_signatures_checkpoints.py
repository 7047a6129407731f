"""The signatures of checkpoints tell another model from a damaged file, and saving from loading."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import checkpoints, saving

_LOADING = "Error(s) in loading state_dict for Net:"
_MISSING = '\n\tMissing key(s) in state_dict: "fc.weight".'
_SIZE = (
    "\n\tsize mismatch for fc.weight: copying a param with shape torch.Size([10, 4]) from checkpoint, the shape in "
    "current model is torch.Size([5, 4])."
)
SIGNATURES = checkpoints.SIGNATURES + saving.SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError", *places: str) -> str | None:
    """Return the id of the best signature of all for one statement."""
    frames = tuple(
        Frame(file=place.rpartition(":")[0], line=1, function=place.rpartition(":")[2]) for place in places
    )
    statement = Statement(text=text, exception=exception, kind="exception" if exception else "line", frames=frames)
    found = best_match(statement)
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        last = text.rpartition("in <module>\n")[2]
        bodies = (text, last, last.partition(": ")[2])
        assert any(re.search(pattern, body, re.IGNORECASE) for pattern in signature.patterns for body in bodies), text


@pytest.mark.parametrize(
    ("text", "exception", "expected"),
    [
        (_LOADING + _SIZE, "RuntimeError", "H977"),
        (_LOADING + _MISSING, "RuntimeError", "H978"),
        (_LOADING + _MISSING + _SIZE, "RuntimeError", "H977"),
        ("PytorchStreamReader failed locating file constants.pkl: file not found", "RuntimeError", "H1340"),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0", "RuntimeError", "H980"),
        ("Cannot use ``weights_only=True`` with files saved in the legacy .tar format. ", "RuntimeError", "H983"),
        ("Weights only load failed. This file can still be loaded, to do so", "UnpicklingError", "H982"),
        ("invalid load key, 'v'.", "UnpicklingError", "H1335"),
        ("model_state_dict", "KeyError", "H1330"),
        ("'optimizer'", "KeyError", "H1330"),
        ("'image'", "KeyError", "H1371"),
        ("'decoder'", "KeyError", "H1371"),
    ],
)  # fmt: skip
def test_neighbours_are_told_apart(text: str, exception: str, expected: str) -> None:
    """Texts that share words belong to one signature each."""
    assert cause(text, exception) == expected


def test_an_empty_end_of_file_is_a_checkpoint_only_within_torch() -> None:
    """An EOFError without a text is a cut checkpoint where torch.load raised it, and unknown elsewhere."""
    assert cause("", "EOFError", "train.py:main", "site-packages/torch/serialization.py:load") == "H979"
    assert cause("EOF when reading a line", "EOFError", "train.py:main") is None


def test_a_missing_module_is_a_pickle_only_where_something_was_unpickled() -> None:
    """The same words are a package that is not installed anywhere else, and where no frame is known."""
    text = "No module named 'models'"
    assert cause(text, "ModuleNotFoundError", "train.py:main", "torch/serialization.py:find_class") == "H985"
    assert cause(text, "ModuleNotFoundError", "train.py:<module>") == "H1361"
    assert cause(text, "ModuleNotFoundError") == "H1361"


def test_what_cannot_be_pickled_is_about_saving_only_within_torch_save() -> None:
    """Within the saving of torch it is the checkpoint, elsewhere something that goes to another process."""
    text = "Can't pickle local object 'main.<locals>.<lambda>'"
    assert cause(text, "AttributeError", "train.py:main", "torch/serialization.py:_save") == "H1332"
    assert cause(text, "AttributeError", "train.py:main", "multiprocessing/reduction.py:dump") == "H940"


@pytest.mark.parametrize(
    "line",
    ["loading checkpoint: size 3 MB", "missing keys: [] unexpected: []", "saved model_state_dict to last.pt"],
)
def test_talk_of_checkpoints_is_no_failure(line: str) -> None:
    """Lines that people print about checkpoints match nothing."""
    assert cause(line, None) is None
