"""`FeatureCache`: what a function changes by running is no difference, and what somebody else changes is one."""

from __future__ import annotations

import collections
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

from holdfast.core.errors import LoaderError
from holdfast.data.features import cache as feature_cache
from holdfast.data.features.cache import FeatureCache
from holdfast.data.features.files import Draft

ITEMS = 9
BANKS: dict[int, Any] = {}
SEEN = 0


def build(dataset: Any, fn: Any, path: Path, **options: Any) -> FeatureCache:
    return FeatureCache.build(dataset, fn, path, **{"num_workers": 0, "progress": False, **options})


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Each test begins as a process that has built nothing yet."""
    _as_another_process()


def _as_another_process() -> None:
    global SEEN
    BANKS.clear()
    SEEN = 0
    feature_cache._left.clear()


def bank(rate: int) -> torch.Tensor:
    if rate not in BANKS:
        BANKS[rate] = torch.arange(rate, rate + 3.0)
    return BANKS[rate]


def banked(sample: int) -> torch.Tensor:
    return bank(16000) * sample


def many_banks(sample: int) -> torch.Tensor:
    return bank(16000 + sample) * sample


def late_bank(sample: int) -> torch.Tensor:
    return bank(16000 + sample // 5) * sample


def counted_globally(sample: int) -> int:
    global SEEN
    SEEN += 1
    return sample


class Lazy:
    """Makes what it needs when it is first called."""

    def __init__(self, gain: float = 2.0) -> None:
        self.gain = gain
        self.window: torch.Tensor | None = None

    def __call__(self, sample: int) -> torch.Tensor:
        if self.window is None:
            self.window = torch.ones(4)
        return self.window * sample * self.gain

    def method(self, sample: int) -> torch.Tensor:
        return self(sample)


class Counting:
    """Counts its calls, also in a name that is not there before, and keeps what it was called with last."""

    def __init__(self, gain: int = 2) -> None:
        self.gain = gain
        self.state = {"gain": gain, "seen": 0}
        self.last = None

    def __call__(self, sample: int) -> int:
        self.calls = getattr(self, "calls", 0) + 1
        self.state["seen"] += 1
        self.last = ("called with", sample)
        return sample * self.gain * self.state["gain"]

    def method(self, sample: int) -> int:
        return self(sample)


def with_list(kind: Callable[..., Any] = list) -> Any:
    calls = kind()

    def fn(sample: int) -> int:
        calls.append(sample)
        return sample

    return fn


def with_number() -> Any:
    number = 0

    def fn(sample: int) -> int:
        nonlocal number
        number += 1
        return sample

    return fn


def with_attribute() -> Any:
    def fn(sample: int) -> int:
        fn.calls = getattr(fn, "calls", 0) + 1  # type: ignore[attr-defined]
        return sample

    return fn


def with_counts() -> Any:
    counts: Any = collections.Counter()

    def fn(sample: int) -> int:
        counts[sample] += 1
        counts["all"] += 1
        return sample

    return fn


def with_helper() -> Any:
    calls: list[int] = []

    def helper(sample: int) -> int:
        calls.append(sample)
        return sample

    def fn(sample: int) -> int:
        calls.append(-sample)
        return helper(sample)

    return fn


def with_set() -> Any:
    seen: set[int] = set()

    def fn(sample: int) -> int:
        seen.add(sample)
        return sample

    return fn


CHANGING = {
    "list": with_list,
    "deque": lambda: with_list(lambda: collections.deque(maxlen=3)),
    "nonlocal": with_number,
    "function attribute": with_attribute,
    "global": lambda: counted_globally,
    "memo": lambda: banked,
    "memo by sample": lambda: many_banks,
    "counter": with_counts,
    "set": with_set,
    "a helper's": with_helper,
    "lazy": Lazy,
    "lazy method": lambda: Lazy().method,
    "counting": Counting,
    "counting method": lambda: Counting().method,
    "mock": lambda: Mock(side_effect=abs),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", CHANGING.values(), ids=list(CHANGING))
def test_what_a_function_changes_by_running_does_not_make_its_cache_stale(tmp_path, make, workers):
    """The second build opens the file: at once, after calls beside it or a build of another one, after a restart."""
    fn, path = make(), tmp_path / "f.h5"
    build(range(ITEMS), fn, path, num_workers=workers).close()
    old = path.stat().st_ino

    def opened(function: Any) -> None:
        build(range(ITEMS), function, path, num_workers=workers).close()
        assert path.stat().st_ino == old

    opened(fn)
    fn(0)
    fn(1)
    opened(fn)
    build(range(ITEMS), fn, tmp_path / "other.h5", num_workers=workers).close()
    opened(fn)
    _as_another_process()
    opened(make())
    warm = make()
    warm(0)
    opened(warm)


def test_a_function_that_counts_is_called_once_for_each_item(tmp_path):
    """Nothing is computed to find out what it changes, and nothing again."""
    calls: list[int] = []

    def fn(sample: int) -> int:
        calls.append(sample)
        return sample

    for _ in range(3):
        assert list(build(range(ITEMS), fn, tmp_path / "f.h5")) == list(range(ITEMS))
        assert calls == list(range(ITEMS))


@pytest.mark.parametrize("at", range(ITEMS))
def test_a_build_that_failed_goes_on_although_the_function_has_counted(tmp_path, at):
    """Wherever it failed, each item is computed once, and the file is that of a build that did not fail."""
    calls: list[int] = []
    path = tmp_path / "f.h5"

    def fn(sample: int) -> int:
        calls.append(sample)
        if sample == at and calls.count(sample) == 1:
            raise OSError("not now")
        return 2 * sample

    with pytest.raises(LoaderError, match=f"item {at} .* not now"):
        build(range(ITEMS), fn, path)
    assert Draft(path).items_written() == at
    assert list(build(range(ITEMS), fn, path)) == [2 * sample for sample in range(ITEMS)]
    assert calls == sorted([*range(ITEMS), at])
    others = [[at, at], [at, *range(20)]] if at != 1 else []  # then nobody has seen two items of one process
    for there in ([], *others):
        calls[:] = there
        build(range(ITEMS), fn, path).close()
        assert calls == there


@pytest.mark.parametrize("make", CHANGING.values(), ids=list(CHANGING))
def test_the_file_is_the_same_whoever_computes_with_a_function_that_changes(tmp_path, make):
    """With any number of workers, to the last byte."""
    for workers in (0, 1, 3):
        _as_another_process()
        build(range(ITEMS), make(), tmp_path / f"{workers}.h5", num_workers=workers).close()
    first, *others = ((tmp_path / f"{workers}.h5").read_bytes() for workers in (0, 1, 3))
    assert others == [first, first]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_function_makes_may_be_such_that_nobody_can_tell_it(tmp_path, workers):
    """The features are good all the same."""
    made: list[Any] = []

    class Untold:
        def __array__(self) -> Any:
            raise RuntimeError("not here")

    def fn(sample: int) -> int:
        made.append(Untold())
        return sample

    assert list(build(range(ITEMS), fn, tmp_path / "f.h5", num_workers=workers)) == list(range(ITEMS))


def test_a_function_that_changes_nothing_has_a_file_without_a_word_of_it(tmp_path):
    """So files are as they were before this was looked for."""
    with build(range(ITEMS), abs, tmp_path / "f.h5") as cache:
        assert cache._contents.origin.runs is None
        assert b'"runs"' not in (tmp_path / "f.h5").read_bytes()


def _stale(path: Path, fn: Any, named: str, dataset: Any = range(ITEMS), **options: Any) -> None:
    with pytest.raises(LoaderError, match=named) as caught:
        build(dataset, fn, path, **options)
    assert caught.value.rule == "H620"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_parameter_beside_what_changes_is_still_compared(tmp_path, workers, restarted):
    """In the same dict, list or object, before the first run and after it."""
    state: dict[str, Any] = {"gain": 2, "seen": 0, "log": []}
    log: list[Any] = [3]
    counting, lazy = Counting(), Lazy()
    fns: dict[str, Callable[[int], Any]] = {}

    def with_state(sample: int) -> int:
        state["seen"] += 1
        state["log"].append(sample)
        state["last"] = sample
        return sample * int(state["gain"])

    def with_log(sample: int) -> int:
        log.append(sample)
        return sample * int(log[0])

    fns = {"state": with_state, "log": with_log, "counting": counting, "method": counting.method, "lazy": lazy}
    for name, fn in fns.items():
        build(range(ITEMS), fn, tmp_path / name, num_workers=workers).close()
    if restarted:
        feature_cache._left.clear()
        for fn in fns.values():
            fn(4)
    for name, fn in fns.items():
        build(range(ITEMS), fn, tmp_path / name, num_workers=workers).close()
    state["gain"] = 3
    _stale(tmp_path / "state", with_state, "closure state", num_workers=workers)
    state["gain"] = 2
    build(range(ITEMS), with_state, tmp_path / "state", num_workers=workers).close()
    log[0] = 4
    _stale(tmp_path / "log", with_log, "closure log", num_workers=workers)
    counting.state["gain"] = 3
    _stale(tmp_path / "counting", counting, "attribute state", num_workers=workers)
    _stale(tmp_path / "method", counting.method, "self", num_workers=workers)
    counting.state["gain"], counting.gain = 2, 5
    _stale(tmp_path / "counting", counting, "attribute gain was 2 and is 5", num_workers=workers)
    _stale(tmp_path / "method", counting.method, "self", num_workers=workers)
    lazy.gain = 3.0
    _stale(tmp_path / "lazy", lazy, r"attribute gain was 2\.0 and is 3\.0", num_workers=workers)


def test_a_lazy_value_that_somebody_sets_is_another_one(tmp_path):
    """It is what it was before the first run, or after it: a third one gives other features."""
    lazy = Lazy()
    build(range(ITEMS), lazy, tmp_path / "f.h5").close()
    for window in (torch.zeros(4), torch.ones(5)):
        lazy.window = window
        _stale(tmp_path / "f.h5", lazy, "attribute window")
    for right in (torch.ones(4), None):
        lazy.window = right
        build(range(ITEMS), lazy, tmp_path / "f.h5").close()


def test_an_option_beside_one_that_the_function_chooses_is_compared(tmp_path):
    """A dict that the function fills once is no dict of which nothing counts."""
    options: dict[str, int] = {}

    def fn(sample: int) -> int:
        return sample * options.setdefault("size", 400) + options.get("offset", 0)

    build(range(ITEMS), fn, tmp_path / "f.h5").close()
    build(range(ITEMS), fn, tmp_path / "f.h5").close()
    for edited in ({"size": 800}, {"size": 400, "offset": 1}, {"offset": 1}):
        options.clear()
        options.update(edited)
        _stale(tmp_path / "f.h5", fn, "closure options")
    options.clear()
    build(range(ITEMS), fn, tmp_path / "f.h5").close()


def test_an_object_that_is_reached_twice_keeps_its_parameters(tmp_path):
    """Found in a log first and in a variable then, its gain counts all the same."""
    settings = {"gain": 2, "seen": 0}
    all_of_it: list[Any] = [settings]
    log: list[Any] = []

    def fn(sample: int) -> int:
        settings["seen"] += 1
        log.append(settings)
        return sample * settings["gain"] * int(all_of_it[0]["gain"])

    build(range(ITEMS), fn, tmp_path / "f.h5").close()
    settings["gain"] = 3
    _stale(tmp_path / "f.h5", fn, "closure")


def test_a_parameter_beside_a_list_that_lies_in_two_places_is_compared(tmp_path):
    """The list is left out at both places, and the dict around one of them is not."""
    calls: list[int] = []
    state = {"gain": 2, "calls": calls}

    def fn(sample: int) -> int:
        calls.append(sample)
        return sample * int(state["gain"])

    path = tmp_path / "f.h5"
    for _ in range(2):
        build(range(ITEMS), fn, path).close()
        fn(3)
    feature_cache._left.clear()
    build(range(ITEMS), fn, path).close()
    state["gain"] = 3
    _stale(path, fn, "closure state")


def test_a_table_of_weights_beside_what_changes_is_compared(tmp_path):
    """A module that keeps a running mean is told without it, and its weights count."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, sample: int) -> torch.Tensor:
            return self.norm(self.linear(torch.tensor([[float(sample)], [1.0]]))).detach()

    net, path = Net(), tmp_path / "f.h5"
    build(range(ITEMS), net, path).close()
    for _ in range(2):
        net(4)
        build(range(ITEMS), net, path).close()
    for parameter in net.parameters():
        with torch.no_grad():
            parameter += 1
        _stale(path, net, "attribute _modules")
        with torch.no_grad():
            parameter -= 1
        build(range(ITEMS), net, path).close()


def test_what_changes_late_is_known_to_the_process_that_built(tmp_path):
    """A table that the first items do not fill: exactly as the build has left it, or empty, and nothing else."""
    path = tmp_path / "f.h5"
    build(range(ITEMS), late_bank, path).close()
    build(range(ITEMS), late_bank, path).close()
    BANKS[16001] += 1
    _stale(path, late_bank, "global bank")
    _as_another_process()
    build(range(ITEMS), late_bank, path).close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unfinished_build_of_another_parameter_is_not_continued(tmp_path, workers):
    """Although the function has counted meanwhile, which does not matter."""
    counting, path = Counting(), tmp_path / "f.h5"
    spoilt = [0, 1, 2, 3, 4, set(), 6, 7, 8]  # a set cannot be multiplied
    with pytest.raises(LoaderError, match="item 5"):
        build(spoilt, counting, path, num_workers=workers)
    assert Draft(path).items_written() == 5
    counting.gain = 3
    _stale(path, counting, "unfinished build of .* attribute gain", dataset=spoilt)
    counting.gain = 2
    with pytest.raises(LoaderError, match="item 5"):
        build(spoilt, counting, path, num_workers=workers)


def test_a_changed_sample_of_a_dataset_in_memory_is_found_wherever_it_is(tmp_path):
    """Lists, tuples, arrays, tensors and TensorDatasets are compared whole."""
    for number, make in enumerate(
        (list, tuple, np.stack, torch.stack, lambda rows: TensorDataset(torch.stack(rows)))
    ):
        path = tmp_path / f"{number}.h5"
        rows = [torch.full((3,), float(row)) for row in range(40)]
        build(make(rows), len, path).close()
        build(make([row.clone() for row in rows]), len, path).close()
        for index in range(40):
            changed = [row + (place == index) for place, row in enumerate(rows)]
            _stale(path, len, "dataset: (sample|content)", dataset=make(changed))


def test_a_dataset_that_is_large_or_elsewhere_is_told_by_eight_samples(tmp_path, monkeypatch):
    """Its other samples are not read to compare it."""
    monkeypatch.setattr("holdfast.data.features.keys._MOST_CONTENT_BYTES", 100 * 1024)
    rows = [torch.zeros(3) for _ in range(40)]
    with build(rows, len, tmp_path / "f.h5") as cache:
        assert "dataset: content" not in cache.key
    with build(rows[:10], len, tmp_path / "g.h5") as cache:
        assert "dataset: content" in cache.key

    class Elsewhere(list[Any]):
        """What says of itself how it is read."""

    with build(Elsewhere(rows[:10]), len, tmp_path / "h.h5") as cache:
        assert "dataset: content" not in cache.key


def test_a_file_without_the_content_of_its_dataset_stays_good(tmp_path, monkeypatch):
    """As those that were built before it was told."""
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.data.features.keys._MOST_CONTENT_BYTES", 0)
        build([1, 2, 3], abs, tmp_path / "f.h5").close()
    old = (tmp_path / "f.h5").stat().st_ino
    build([1, 2, 3], abs, tmp_path / "f.h5").close()
    assert (tmp_path / "f.h5").stat().st_ino == old


class Failing:
    """A dataset that cannot read one sample."""

    def __init__(self, at: set[int]) -> None:
        self.at = at

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        if index in self.at:
            raise OSError("not now")
        return index


@pytest.mark.parametrize("at", range(5))
def test_what_comes_before_a_sample_that_cannot_be_read_is_kept(tmp_path, at):
    """Also where that sample is one that tells datasets apart; once it can be read, the file is as any other."""
    path = tmp_path / "f.h5"
    for _ in range(2):
        with pytest.raises(LoaderError, match=f"item {at} of the dataset raised OSError: not now") as caught:
            build(Failing({at}), abs, path)
        assert caught.value.rule == "H623"
        assert Draft(path).items_written() == at
    assert list(build(Failing(set()), abs, path)) == list(range(5))
    build(Failing(set()), abs, tmp_path / "whole.h5").close()
    assert path.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_finished_file_is_not_opened_for_a_dataset_that_cannot_be_compared(tmp_path):
    """Nobody knows whether it is the one that it was made from."""
    build(Failing(set()), abs, tmp_path / "f.h5").close()
    for at in ({2}, set(range(5))):
        with pytest.raises(LoaderError, match=f"item {min(at)} of the dataset") as caught:
            build(Failing(at), abs, tmp_path / "f.h5")
        assert caught.value.rule == "H623"


def test_a_rebuild_that_gives_other_features_is_noticed_by_readers_of_the_old_file(tmp_path):
    """Of the same function, shapes and length: who had the old file open is told, here and in spawned workers."""
    content, path = tmp_path / "content", tmp_path / "f.h5"
    content.write_text("1")
    fn = _Opening(content)
    old = build(range(ITEMS), fn, path)
    content.write_text("2")
    new = build(range(ITEMS), fn, path, rebuild=True)
    assert new.key == old.key
    assert float(old[1]) == 1.0
    old.close()
    with pytest.raises(LoaderError, match="was replaced by another one") as caught:
        old[1]
    assert caught.value.rule == "H620"
    again = build(range(ITEMS), fn, path, rebuild=True)
    new.close()
    assert float(new[1]) == float(again[1]) == 2.0  # the same features are no others


@pytest.mark.slow
def test_spawned_workers_of_an_old_cache_do_not_read_a_new_one(tmp_path):
    """They open the file themselves."""
    content, path = tmp_path / "content", tmp_path / "f.h5"
    content.write_text("1")
    old = build(range(ITEMS), _Opening(content), path)
    content.write_text("2")
    build(range(ITEMS), _Opening(content), path, rebuild=True)
    loader = TorchDataLoader(old, num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn"))
    with pytest.raises((LoaderError, RuntimeError), match="was replaced by another one"):  # as torch hands it on
        list(loader)


class _Opening:
    """A function whose features depend on a file that nobody sees."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __call__(self, sample: int) -> torch.Tensor:
        return torch.tensor(sample * float(Path(self.path).read_text()))


def test_a_file_that_was_built_before_its_index_had_a_digest_can_be_read(tmp_path, monkeypatch):
    """Its description has a word less."""
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda value, dumps=json.dumps, **options: dumps(_without(value), **options))
        build(range(ITEMS), abs, tmp_path / "f.h5").close()
    assert b'"index": ' not in (tmp_path / "f.h5").read_bytes()
    assert list(build(range(ITEMS), abs, tmp_path / "f.h5")) == list(range(ITEMS))


def _without(value: Any) -> Any:
    return {name: item for name, item in value.items() if name != "index"} if isinstance(value, dict) else value
