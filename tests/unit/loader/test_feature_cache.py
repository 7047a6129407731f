"""`FeatureCache`: computed once, read back exactly, and never mistaken for the features of
something else.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import types
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from recipes.features.cache import FeatureCache

from holdfast.core.errors import LoaderError
from holdfast.testing import flip_bit

VALUES: list[Any] = [  # what tests/property/test_feature_cache.py does not make
    torch.randn(3, 4),
    torch.randn(2, 3, dtype=torch.complex64).conj(),
    torch.randn(4).to(torch.float8_e4m3fn),
    torch.arange(12).reshape(3, 4).T,
    np.float16(0.1),
    "text \ud800 é",
    {None: ()},
]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [
            t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b) if t.numel()
        ]
        return a.dtype == b.dtype and a.shape == b.shape and (not bits or torch.equal(*bits))
    return repr(a) == repr(b)


def build(dataset: Any, fn: Any, path: Path, **options: Any) -> FeatureCache:
    return FeatureCache.build(
        dataset, fn, path, **{"version": 1, "num_workers": 0, "progress": False, **options}
    )


def noisy(sample: int) -> dict[str, Any]:
    return {"mel": torch.randn(sample % 5 + 1, 3), "chance": (random.random(), np.random.random())}


def identity(sample: Any) -> Any:
    return sample


def doubled(sample: int) -> int:
    """Double, or fail as the environment says: what lies there is not part of the function."""
    if sample == int(os.environ.get("FAIL_AT", "-1")):
        raise StopIteration("spoilt")
    return 2 * sample


def test_every_kind_of_value_comes_back_with_type_shape_and_every_bit(tmp_path):
    """Tensors of any type, arrays, scalars, text and containers are what fn returned, one by
    one.
    """
    with build(VALUES, identity, tmp_path / "f.h5") as cache:
        assert len(cache) == len(VALUES)
        assert all(map(same, cache, VALUES))
        cache[0].add_(1)  # what is read belongs to the reader
        assert same(cache[0], VALUES[0])
        with pytest.raises(IndexError):
            cache[len(VALUES)]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [torch.ones(2).to_sparse()]}, r"features\['a'\]\[0\]"),
        ((1, {1, 2}), r"features\[1\] is a builtins.set"),
        (np.array([object()]), "numpy.ndarray"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (types.SimpleNamespace(), "SimpleNamespace"),
    ],
    ids=["sparse", "set", "objects", "masked", "namespace"],
)
def test_a_value_that_needs_pickle_is_refused_by_its_place(tmp_path, value, place):
    """What cannot be stored is an error that names the item and the place in it."""
    with pytest.raises(
        LoaderError, match=f"item 1 of the dataset raised TypeError: .*{place}"
    ) as caught:
        build([0, value], identity, tmp_path / "f.h5")
    assert caught.value.rule == "H623"


@pytest.mark.parametrize("how", [{"num_workers": 1}, {"num_workers": 3}], ids=str)
def test_the_file_is_the_same_whoever_computes_it(tmp_path, how):
    """Random numbers and all, the file does not depend on the number of workers, to the last
    byte.
    """
    build(range(40), noisy, tmp_path / "a.h5").close()
    build(range(40), noisy, tmp_path / "b.h5", **how).close()
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.h5", "b.h5"]


def test_a_build_leaves_the_random_state_alone(tmp_path):
    """Building in this process draws nothing from its own random numbers, nor does it change its
    threads.
    """
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    build(range(5), noisy, tmp_path / "f.h5")
    after = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_finished_cache_is_not_computed_again(tmp_path):
    """With the same function and dataset the file is opened, by builds and by `FeatureCache`
    alike.
    """
    calls = multiprocessing.get_context("fork").Value("i", 0)

    def fn(sample: int) -> int:
        with calls.get_lock():
            calls.value += 1
        return sample

    for _ in range(2):
        assert list(build(range(12), fn, tmp_path / "f.h5", num_workers=2)) == list(range(12))
    assert list(FeatureCache(tmp_path / "f.h5")) == list(range(12))
    assert calls.value == 12


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version was 1 and is 2"),
        ({"version": "1"}, 'version was 1 and is "1"'),
        ({"dataset": [1, 2, 3]}, "length of the dataset was 4 and is 3"),
        ({"parameters": {"n_mels": 40}}, "parameter n_mels was 80 and is 40"),
        ({"parameters": None}, "parameter n_mels was 80 and is gone"),
        (
            {"parameters": {"n_mels": 80, "rate": [8, 16]}},
            r"parameter rate was not there and is \[8, 16\]",
        ),
        ({"seed": 1}, "seed was 0 and is 1"),
    ],
    ids=str,
)
def test_a_stale_cache_is_an_error_that_names_what_differs(tmp_path, change, named):
    """Features of another version, parameter, seed or length are never returned."""
    build([1, 2, 3, 4], round, tmp_path / "f.h5", parameters={"n_mels": 80}).close()
    how = {"dataset": [1, 2, 3, 4], "fn": round, "parameters": {"n_mels": 80}} | change
    with pytest.raises(LoaderError, match=named) as caught:
        build(path=tmp_path / "f.h5", **how)
    assert caught.value.rule == "H620"
    (tmp_path / "f.h5").unlink()
    assert len(build(path=tmp_path / "f.h5", **how)) == len(how["dataset"])


def test_a_failing_item_is_named_and_what_came_before_is_kept(tmp_path, monkeypatch):
    """The error names the item, also for StopIteration; the next build computes from there on."""
    for workers in (0, 2):
        path = tmp_path / f"f{workers}.h5"
        monkeypatch.setenv("FAIL_AT", "17")
        with pytest.raises(
            LoaderError, match=r"item 17 of the dataset raised StopIteration: spoilt"
        ) as caught:
            build(range(40), doubled, path, num_workers=workers)
        assert caught.value.rule == "H623"
        told = "".join(getattr(caught.value, "__notes__", [])) or repr(caught.value.__cause__)
        assert "spoilt" in told
        with pytest.raises(LoaderError, match="not finished: its build was stopped") as caught:
            FeatureCache(path)
        assert caught.value.rule == "H621"
        monkeypatch.delenv("FAIL_AT")
        assert list(build(range(40), doubled, path, num_workers=workers)) == [
            2 * index for index in range(40)
        ]
    assert (tmp_path / "f0.h5").read_bytes() == (tmp_path / "f2.h5").read_bytes()


def test_an_unfinished_build_is_not_continued_as_another_version(tmp_path, monkeypatch):
    """Half of one version's features and half of another's is an error."""
    monkeypatch.setenv("FAIL_AT", "3")
    with pytest.raises(LoaderError, match="item 3"):
        build(range(5), doubled, tmp_path / "f.h5")
    with pytest.raises(
        LoaderError, match=r"the unfinished build of .* version was 1 and is 2"
    ) as caught:
        build(range(5), identity, tmp_path / "f.h5", version=2)
    assert caught.value.rule == "H620"
    shutil.rmtree(tmp_path / "f.h5.building")
    assert list(build(range(5), identity, tmp_path / "f.h5", version=2)) == list(range(5))


def test_a_file_that_was_replaced_while_it_was_open_is_not_read_on(tmp_path):
    """Who had the old one open keeps it until it is closed; then the new one is no part of it."""
    old = build(range(5), identity, tmp_path / "f.h5")
    (tmp_path / "f.h5").unlink()
    assert list(build(range(5), doubled, tmp_path / "f.h5", version=2)) == [0, 2, 4, 6, 8]
    assert list(old) == list(range(5))
    old.close()
    with pytest.raises(LoaderError, match="was replaced by another one") as caught:
        old[0]
    assert caught.value.rule == "H620"


def test_a_flipped_bit_is_found_when_its_item_is_read(tmp_path):
    """The other items can be read."""
    cache = build([torch.randn(50) for _ in range(6)], identity, tmp_path / "f.h5")
    assert len(list(cache)) == 6
    flip_bit(tmp_path / "f.h5", 8 * (65536 + 900))
    bad = []
    for index in range(6):
        try:
            cache[index]
        except LoaderError as error:
            bad.append(index)
            rule = error.rule
    assert (len(bad), rule) == (1, "H622")


@pytest.mark.parametrize(
    ("content", "rule"),
    [(b"", "H622"), (b"no HDF5", "H622"), (None, "H625"), ("cut", "H622"), ("other", "H620")],
    ids=str,
)
def test_a_file_that_is_no_whole_cache_is_neither_read_nor_replaced(tmp_path, content, rule):
    """Empty, cut off, missing, or HDF5 of another kind.

    A clear error, and a build overwrites nothing of it.
    """
    path = tmp_path / "f.h5"
    if content == "cut":
        build(list(range(9)), identity, path).close()
        os.truncate(path, path.stat().st_size - 1)
    elif content == "other":
        with h5py.File(path, "w") as file:
            file["x"] = 1
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(LoaderError) as caught:
        FeatureCache(path)
    assert caught.value.rule == rule
    if content is not None:
        before = path.read_bytes()
        with pytest.raises(LoaderError) as caught:
            build([1], identity, path)
        assert caught.value.rule == rule
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dataset": []}, "and an item"),
        ({"dataset": iter([1])}, "list_iterator"),
        ({"parameters": [1]}, "parameters="),
        ({"parameters": {"window": torch.ones(2)}}, r"parameters\['window'\] is a Tensor"),
        ({"version": None}, "version=None"),
        (
            {"num_workers": 1, "multiprocessing_context": "spawn", "fn": lambda sample: sample},
            "cannot be started",
        ),
    ],
    ids=["dataset", "iterator", "parameters", "tensor", "version", "spawn"],
)
def test_arguments_that_cannot_be_used_are_clear_errors(tmp_path, change, named):
    """Each is named, with what is expected."""
    with pytest.raises(LoaderError, match=named) as caught:
        build(**{"dataset": [1], "fn": identity, "path": tmp_path / "f.h5", **change})
    assert caught.value.rule == "H625"
