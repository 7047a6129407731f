"""The signatures of loading tell how a worker died, what could not be batched, and leave talk of workers alone."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures.loading import SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError", *places: str) -> str | None:
    """Return the id of the best signature of all for one statement.

    Args:
        text: Message, or line.
        exception: Class, or None for a line.
        places: ``file:function`` of the frames, innermost last.
    """
    frames = tuple(
        Frame(file=place.rpartition(":")[0], line=1, function=place.rpartition(":")[2]) for place in places
    )
    kind = "exception" if exception else "line"
    found = best_match(Statement(text=text, exception=exception, kind=kind, frames=frames))  # type: ignore[arg-type]
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        patterns = (*signature.patterns, *(pattern for pattern, _ in signature.in_frames))
        assert any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns), text


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        ("Killed", "H930"),
        ("Bus error", "H931"),
        ("Segmentation fault", "H933"),
        ("Aborted", "H1201"),
        ("Floating point exception", "H1201"),
        ("Terminated", "H1202"),
        ("CPU time limit exceeded", "H1202"),
    ],
)
def test_the_signal_of_a_dead_worker_decides(signal: str, expected: str) -> None:
    """One sentence with another signal is another cause, with old and new numbering of processes."""
    for worker in ("(pid 4711)", "(pid(s) 4711, 4712)"):
        assert cause(f"DataLoader worker {worker} is killed by signal: {signal}. ") == expected


def test_a_worker_that_left_by_itself_is_told_from_one_that_is_only_gone() -> None:
    """With an exit code the worker ended itself; without one nothing is known."""
    assert cause("DataLoader worker (pid(s) 12) exited unexpectedly") == "H929"
    assert cause("DataLoader worker (pid 12) exited unexpectedly with exit code 3. Details are lost") == "H935"


def test_what_cannot_be_pickled_counts_only_on_its_way_to_a_process() -> None:
    """The same message in a save of a checkpoint is no matter of the loader."""
    text = "Can't pickle local object 'main.<locals>.<lambda>'"
    assert cause(text, "AttributeError", "/usr/lib/python3.11/multiprocessing/popen_spawn_posix.py:_launch") == "H940"
    assert cause(text, "AttributeError", "/venv/torch/serialization.py:_save") != "H940"


def test_an_error_of_files_is_the_loaders_only_where_a_tensor_is_rebuilt() -> None:
    """A connection or file that is missing elsewhere is not a lost tensor."""
    place = "/venv/torch/multiprocessing/reductions.py:rebuild_storage_fd"
    assert cause("[Errno 104] Connection reset by peer", "ConnectionResetError", place) == "H939"
    assert cause("[Errno 104] Connection reset by peer", "ConnectionResetError", "/app/train.py:send") != "H939"
    assert cause("[Errno 2] No such file or directory: 'a.csv'", "FileNotFoundError", "/app/data.py:read") != "H939"


def test_a_sample_of_none_is_told_from_other_types() -> None:
    """None has its own cause among the types that cannot be batched, in every wording."""
    known = "batch must contain tensors, numpy arrays, numbers, dicts or lists; found "
    assert cause("default_collate: " + known + "<class 'NoneType'>", "TypeError") == "H944"
    assert cause("default_collate: " + known + "<class 'PIL.Image.Image'>", "TypeError") == "H1225"
    assert cause("default_collate: " + known + "object", "TypeError") == "H1225"


def test_a_missing_key_is_the_batchs_only_within_collate() -> None:
    """A KeyError of user code has no cause in the loader."""
    assert cause("'mask'", "KeyError", "/venv/torch/utils/data/_utils/collate.py:collate") == "H1226"
    assert cause("'mask'", "KeyError", "/app/train.py:collate") != "H1226"


def test_a_broken_archive_is_a_numpy_file_only_within_numpy() -> None:
    """np.load opens zip files too, and says so by its frames alone."""
    assert cause("File is not a zip file", "BadZipFile", "/venv/numpy/lib/_npyio_impl.py:zipfile_factory") == "H1232"
    assert cause("File is not a zip file", "BadZipFile", "/usr/lib/python3.11/zipfile.py:_RealGetContents") == "H1237"


def test_a_dataset_without_getitem_is_told_from_a_sample_of_none() -> None:
    """Only an object of the user's own that is indexed by the loader lacks the method."""
    place = "/venv/torch/utils/data/_utils/fetch.py:<listcomp>"
    assert cause("'Samples' object is not subscriptable", "TypeError", place) == "H1206"
    assert cause("'NoneType' object is not subscriptable", "TypeError", place) != "H1206"
    assert cause("'Samples' object is not subscriptable", "TypeError", "/app/train.py:main") != "H1206"


def test_an_hdf5_file_that_is_not_there_is_a_missing_file() -> None:
    """The number of the system's error decides between a missing and a damaged file."""
    begin = "Unable to synchronously open file (unable to open file: name = 'a.h5', "
    assert cause(begin + "errno = 2, error message = 'No such file or directory')", "FileNotFoundError") != "H1233"
    assert cause(begin + "errno = 11, error message = 'Resource temporarily unavailable')", "OSError") == "H1233"


@pytest.mark.parametrize(
    ("text", "exception"),
    [
        ("'mask'", "KeyError"),
        ("[Errno 2] No such file or directory: 'a.yaml'", "FileNotFoundError"),
        ("'Samples' object is not subscriptable", "TypeError"),
        ("Can't get attribute 'Net' on <module '__main__'>", "AttributeError"),
    ],
)
def test_a_last_line_alone_is_left_to_the_general_signature(text: str, exception: str) -> None:
    """What only frames tell apart is not claimed for the loader where there are none."""
    assert cause(text, exception) not in {signature.id for signature in SIGNATURES}


def test_only_an_empty_shuffled_dataset_counts_as_empty() -> None:
    """The same sentence with another number is another mistake."""
    assert cause("num_samples should be a positive integer value, but got num_samples=0", "ValueError") == "H945"
    assert cause("num_samples should be a positive integer value, but got num_samples=0.5", "ValueError") != "H945"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   ",
        "worker 3 exited after epoch 4",
        "8 workers killed and started again for the next epoch",
        "loader timed out 0 times, bus errors 0",
        "dataset: 1200 samples, stack expects equal sizes: padded to 512",
        "DataLoader worker 2: pid 4711, prefetch_factor=2, persistent_workers=True",
        "skipped 3 truncated images",
        "StopIteration handled, next epoch",
        "KeyError: 'mask' was counted 3 times",
    ],
)
def test_talk_of_workers_is_no_failure(line: str) -> None:
    """Lines that people print about loaders fit no signature of this field."""
    own = {signature.id for signature in SIGNATURES}
    assert cause(line, None) not in own
