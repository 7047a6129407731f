"""`FeatureCache`: computed once, read back exactly, and never mistaken for the features of something else."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from holdfast.core.errors import LoaderError
from holdfast.data.features import workers as feature_workers
from holdfast.data.features.cache import FeatureCache
from holdfast.data.features.changing import Origin
from holdfast.data.features.files import Draft
from holdfast.data.features.keys import differences, facts_of
from holdfast.data.features.sources import is_own_file
from holdfast.data.features.workers import Work, compute_in_workers
from holdfast.data.loader import DataLoader
from holdfast.testing import flip_bit

VALUES: list[Any] = [
    torch.randn(3, 4),
    torch.randn(5, 2).to(torch.bfloat16),
    torch.tensor(7, dtype=torch.int8),
    torch.empty(0, 3, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.randn(2, 3, dtype=torch.complex64).conj(),
    torch.randn(4).to(torch.float8_e4m3fn),
    torch.arange(12).reshape(3, 4).T,
    np.arange(6, dtype=">f4").reshape(2, 3),
    np.array(["mel", "é"]),
    np.array([], dtype=np.int16),
    np.float16(0.1),
    np.datetime64("2024-01-02T03:04"),
    np.str_(""),
    np.ndarray((2, 1), "<U0"),
    1,
    -0.0,
    float("inf"),
    2**70,
    1 + 2j,
    True,
    None,
    "text \ud800 é",
    b"\0bytes",
    (torch.ones(2), {"label": 3, "names": ["a", ("b", 1.5)]}, []),
    {1: "one", "x": np.zeros((0, 2)), None: ()},
]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b) if t.numel()]
        return a.dtype == b.dtype and a.shape == b.shape and (not bits or torch.equal(*bits))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def build(dataset: Any, fn: Any, path: Path, **options: Any) -> FeatureCache:
    return FeatureCache.build(dataset, fn, path, **{"num_workers": 0, "progress": False, **options})


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
    """Tensors of any type, arrays, scalars, text and containers are what fn returned, one by one and in a batch."""
    with build(VALUES, identity, tmp_path / "f.h5") as cache:
        assert len(cache) == len(VALUES)
        assert all(map(same, cache, VALUES))
        assert all(map(same, cache.__getitems__([3, -1, 3, 0]), [VALUES[3], VALUES[-1], VALUES[3], VALUES[0]]))
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
    with pytest.raises(LoaderError, match=f"item 1 of the dataset raised TypeError: .*{place}") as caught:
        build([0, value], identity, tmp_path / "f.h5")
    assert caught.value.rule == "H623"


@pytest.mark.parametrize("how", [{"num_workers": 1}, {"num_workers": 3}], ids=str)
def test_the_file_is_the_same_whoever_computes_it(tmp_path, how):
    """Random numbers and all, the file does not depend on the number of workers, to the last byte."""
    build(range(40), noisy, tmp_path / "a.h5").close()
    build(range(40), noisy, tmp_path / "b.h5", **how).close()
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.h5", "b.h5"]


@pytest.mark.slow
def test_the_file_is_the_same_from_spawned_workers(tmp_path):
    """Workers that are spawned, with a dataset and a function that are pickled, compute the same file."""
    build(range(10), noisy, tmp_path / "a.h5").close()
    build(range(10), noisy, tmp_path / "b.h5", num_workers=1, multiprocessing_context="spawn").close()
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_a_build_leaves_the_random_state_alone(tmp_path):
    """Building in this process draws nothing from its own random numbers, nor does it change its threads."""
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    build(range(5), noisy, tmp_path / "f.h5")
    after = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("loader", [TorchDataLoader, DataLoader])
def test_a_loader_reads_it_with_workers(tmp_path, loader):
    """As the dataset of a loader with workers it gives what it gives without."""
    with build(range(30), identity, tmp_path / "f.h5") as cache:
        assert [batch.tolist() for batch in loader(cache, batch_size=4, num_workers=2)] == [
            list(range(first, min(first + 4, 30))) for first in range(0, 30, 4)
        ]


@pytest.mark.slow
def test_a_spawned_reader_opens_the_file_itself(tmp_path):
    """A cache that is pickled into another process carries no descriptor and reads there."""
    with build(range(30), identity, tmp_path / "f.h5") as cache:
        loader = TorchDataLoader(cache, batch_size=30, num_workers=1, multiprocessing_context="spawn")
        assert next(iter(loader)).tolist() == list(range(30))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 99, "key": {}}', "3"])
def test_a_draft_that_tells_nothing_of_its_function_is_begun_anew(tmp_path, text):
    """Whatever a damaged disk has made of it."""
    draft = Draft(tmp_path / "f.h5")
    draft.directory.mkdir()
    draft.begin(Origin({}))
    (draft.directory / "key.json").write_text(text)
    assert draft.origin() is None
    assert list(build([1, 2], identity, tmp_path / "f.h5")) == [1, 2]


def test_an_item_is_asked_for_by_a_whole_number(tmp_path):
    """As of a list: numpy's and torch's whole numbers, also from the end; all else is a TypeError that names it."""
    with build([1, 2, 3], identity, tmp_path / "f.h5") as cache:
        assert [cache[index] for index in (0, -1, np.int64(1), torch.tensor(2))] == [1, 3, 2, 3]
        for index in (slice(0, 2), 1.0, "1", None, [0, 1]):
            with pytest.raises(TypeError, match=type(index).__name__):
                cache[index]
        for index in (3, -4):
            with pytest.raises(IndexError):
                cache[index]


def test_any_hdf5_tool_can_look_into_it(tmp_path):
    """The finished file is plain HDF5: items, an index of their places, and what they were made from."""
    build(VALUES, identity, tmp_path / "f.h5").close()
    with h5py.File(tmp_path / "f.h5") as file:
        begin, end = file["index"][0, :2]
        assert VALUES[0].numpy().tobytes() in file["data"][begin:end].tobytes()
        assert b"dataset: length" in file["about"][:].tobytes()


def test_a_finished_cache_is_not_computed_again(tmp_path):
    """With the same function and dataset the file is opened, by builds and by `FeatureCache` alike."""
    calls = multiprocessing.get_context("fork").Value("i", 0)
    environment = {"calls": calls}

    class Counted:
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 12

    def fn(sample: int) -> int:
        with environment["calls"].get_lock():
            environment["calls"].value += 1
        return sample

    for _ in range(2):
        assert list(build(Counted(), fn, tmp_path / "f.h5", num_workers=2)) == list(range(12))
    assert list(FeatureCache(tmp_path / "f.h5")) == list(range(12))
    assert calls.value == 12


SOURCE = """
import dataclasses, enum, functools, numpy, operator, torch
N_MELS = 80

def helper(sample):
    return sample * N_MELS

def fn(sample, power=2):
    '''Compute.'''
    return helper(sample) ** power  # as always

def make(rate):
    def fn(sample):
        return sample * rate
    return fn

class Object:
    def __init__(self, window):
        self.window = window

    def __call__(self, sample, floor=1e-5):
        return sample * self.window + floor

    def method(self, sample):
        return sample - self.window

@torch.no_grad()
def quiet(sample):
    return sample + N_MELS

@functools.lru_cache
def bank():
    return N_MELS + 1

@torch.inference_mode()
def banked(sample):
    return sample * bank()

@torch.autograd.function.once_differentiable
def closed(sample):
    return sample * N_MELS

@functools.singledispatch
def dispatched(sample):
    return sample

@dispatched.register
def _(sample: int):
    return sample + 21

class Remembered:
    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, sample):
        return self.__wrapped__(sample)

@Remembered
def remembered(sample):
    "Remember."
    return helper(sample) * remembered.gain

helper.offset = 5

def scaled(function):
    @functools.wraps(function)
    def inner(sample):
        return function(sample) * 3
    return inner

@scaled
def tripled(sample):
    return sample - 7

class Base:
    RATE = 22050
    SIZES = (400, 160)

    @staticmethod
    def static(sample):
        return bank() * sample

    @classmethod
    def made(cls, sample, gain=1):
        return cls()(sample) * gain

    @property
    def size(self):
        return self._size if False else len(str(N_MELS))

    @functools.cached_property
    def once(self):
        return helper(1)

    @torch.no_grad()
    def silent(self, sample):
        return doubled(sample)

    def __call__(self, sample, floor=1):
        return sample + floor

Outer = Base

class Derived(Outer):
    def __call__(self, sample, floor=2):
        return super().__call__(sample) + floor

Derived.__qualname__ = "Base"

def doubled(sample):
    return sample + sample

class Stateless:
    def __call__(self, sample):
        return sample + 0.5

class Chain:
    def __init__(self, *steps):
        self.steps = steps

    def __call__(self, sample):
        return [step(sample) for step in self.steps]

class Table(dict):
    def __call__(self, sample):
        return self.get(sample, 11)

@dataclasses.dataclass
class Settings:
    rate: int = 8000

    def __call__(self, sample):
        return sample / self.rate

class Kind(enum.Enum):
    MEL = 1

    def __call__(self, sample):
        return sample ** self.value

class Net(torch.nn.Module):
    def forward(self, sample):
        return doubled(sample)

class Odd:
    def __getattr__(self, name):
        return "everything"

    def __call__(self, sample):
        return sample % 5
"""


def loaded(folder: Path, source: str, expression: str, edited: str = "") -> Any:
    file = folder / f"made{len(list(folder.iterdir()))}.py"
    file.write_text(source)
    module = types.ModuleType("made")
    module.__file__ = str(file)
    sys.modules["made"] = module
    try:
        exec(compile(source, file, "exec", dont_inherit=True), vars(module))
        file.write_text(edited or source)
        return facts_of([1, 2], eval(expression, vars(module)), None, 0)
    finally:
        del sys.modules["made"]


@pytest.mark.parametrize(
    ("expression", "change", "named"),
    [
        ("fn", ("** power", "* power"), "function: source"),
        ("fn", ("power=2", "power=3"), "function: default of power was 2 and is 3"),
        ("fn", ("sample * N_MELS", "sample + N_MELS"), "function: global helper"),
        ("fn", ("N_MELS = 80", "N_MELS = 40"), "function: global helper"),
        ("make(22050)", "make(16000)", "function: closure rate was 22050 and is 16000"),
        (
            "functools.partial(fn, power=2)",
            "functools.partial(fn, power=4)",
            "function: argument power was 2 and is 4",
        ),
        ("Object(1)", "Object(2)", "function: attribute window was 1 and is 2"),
        ("Object(1)", ("floor=1e-5", "floor=1e-6"), "function: __call__: default of floor was 1e-05 and is 1e-06"),
        ("Object(1)", ("self.window + floor", "self.window"), "function: source of Object"),
        ("Object(1).method", "Object(2).method", "function: self"),
        ("fn", "helper", "function: name was fn and is helper"),
        ("lambda sample: sample", "lambda sample: -sample", "function: source"),
        (
            "lambda sample: sample * N_MELS",
            ("N_MELS = 80", "N_MELS = 40"),
            "function: global N_MELS was 80 and is 40",
        ),
        ("quiet", ("sample + N_MELS", "sample - N_MELS"), "function: source"),
        ("quiet", ("N_MELS = 80", "N_MELS = 40"), "function: global N_MELS was 80 and is 40"),
        ("banked", ("N_MELS + 1", "N_MELS + 2"), "function: global bank"),
        ("closed", ("sample * N_MELS\n\n@f", "sample\n\n@f"), "function: closure fn"),
        ("tripled", ("function(sample) * 3", "function(sample) * 4"), "function: source"),
        ("tripled", ("sample - 7", "sample - 8"), "function: closure function"),
        ("Base()", ("RATE = 22050", "RATE = 16000"), "function: class attribute RATE was 22050 and is 16000"),
        ("Base()", ("(400, 160)", "(400, 200)"), "function: class attribute SIZES was tuple(400, 160)"),
        ("Base()", ("N_MELS + 1", "N_MELS + 2"), "function: static: global bank"),
        ("Base.made", ("gain=1", "gain=2"), "function: default of gain was 1 and is 2"),
        ("Base()", ("N_MELS = 80", "N_MELS = 40"), "function: size: global N_MELS was 80 and is 40"),
        ("Base()", ("sample * N_MELS\n\ndef fn", "sample\n\ndef fn"), "function: once: global helper"),
        ("Base()", ("sample + sample", "sample * 2"), "function: silent: global doubled"),
        ("Derived()", ("floor=1)", "floor=3)"), "function: __call__: default of floor was 2; 1 and is 2; 3"),
        ("Derived()", ("sample + floor", "sample - floor"), "function: source of Base"),
        ("Chain(Stateless())", ("sample + 0.5", "sample + 0.25"), "function: attribute steps"),
        ("Table(a=1)", ("(sample, 11)", "(sample, 12)"), "function: source of Table"),
        ("functools.partial(fn, power=Table(a=1))", ("(sample, 11)", "(sample, 12)"), "function: argument power"),
        ("Settings()", ("sample / self.rate", "sample * self.rate"), "function: source of Settings"),
        ("Settings().__call__", ("int = 8000", "int = 9000"), "function: self"),
        ("Kind.MEL", ("sample ** self.value", "sample"), "function: source of Kind"),
        ("Net()", ("sample + sample", "sample * 2"), "function: forward: global doubled"),
        ("Odd()", ("sample % 5", "sample % 6"), "function: source of Odd"),
        (
            "operator.itemgetter('audio')",
            "operator.itemgetter('text')",
            "function: name was operator.itemgetter('audio') and is operator.itemgetter('text')",
        ),
        ("dispatched", ("sample + 21", "sample + 22"), "function: closure dispatch"),
        ("remembered", ("helper(sample) * r", "helper(sample) + r"), "function: attribute __wrapped__"),
        ("helper", ("offset = 5", "offset = 6"), "function: attribute offset was 5 and is 6"),
        ("numpy.vectorize(helper)", ("N_MELS = 80", "N_MELS = 40"), "function: attribute pyfunc"),
        ("{1: 2}.get", "{1: 3}.get", "function: self was dict(1: 2) and is dict(1: 3)"),
    ],
)
def test_what_the_function_consists_of_is_part_of_the_key(tmp_path, expression, change, named):
    """Source, defaults, closures, arguments, attributes, globals: each change is found, and said by its name."""
    before = loaded(tmp_path, SOURCE, expression)
    source, after = (SOURCE, change) if isinstance(change, str) else (SOURCE.replace(*change), expression)
    assert source != SOURCE or isinstance(change, str)
    found = differences(before, loaded(tmp_path, source, after))
    assert any(text.startswith(named) for text in found), found
    assert before == loaded(tmp_path, SOURCE, expression)


def test_a_cached_property_that_was_asked_for_is_no_part_of_the_key(tmp_path):
    """Its function is: what it returned is there or not as it happens."""
    asked = "[made := Base(), made.once][0]"
    assert loaded(tmp_path, SOURCE, "Base()") == loaded(tmp_path, SOURCE, asked)


@pytest.mark.parametrize(
    ("expression", "change"),
    [
        ("fn", ("** power", "* power")),
        ("fn", ("sample * N_MELS", "sample + N_MELS")),
        ("quiet", ("sample + N_MELS", "sample - N_MELS")),
        ("Object(1)", ("self.window + floor", "self.window")),
        ("Base()", ("return doubled(sample)", "return sample")),
    ],
)
def test_a_file_that_was_edited_after_it_was_imported_is_not_what_will_run(tmp_path, expression, change):
    """The features of the old code are not those of the new: neither has the key of the other."""
    old, new = SOURCE, SOURCE.replace(*change)
    edited = loaded(tmp_path, old, expression, edited=new)
    assert edited == loaded(tmp_path, old, expression, edited=new)
    assert differences(edited, loaded(tmp_path, new, expression))


@pytest.mark.parametrize("expression", ["fn", "make(1)", "banked", "Object(1)", "Base()", "lambda x: helper(x)"])
def test_an_edit_elsewhere_in_the_file_is_no_part_of_the_key(tmp_path, expression):
    """Lines that moved do not change what is found; nor, for a function, a text that is no python."""
    there = loaded(tmp_path, SOURCE, expression)
    assert loaded(tmp_path, SOURCE, expression, edited="def above():\n    return 1\n" + SOURCE) == there
    if "()" not in expression and "Object" not in expression:
        assert loaded(tmp_path, SOURCE, expression, edited=SOURCE + "%magic\n") == there


PROJECT = {
    "proj/__init__.py": "",
    "proj/rates.py": "RATE = 8000\n",
    "proj/audio.py": "from proj.rates import RATE\n\ndef logmel(sample):\n    return sample * RATE\n",
    "space/deep/tool.py": "def clip(sample):\n    return sample - 1\n",
    "proj/early.py": """
import proj.audio, space.deep.tool

def chained(sample):
    return proj.audio.logmel(sample)

def spaced(sample):
    return space.deep.tool.clip(sample)

def handed_on(sample):
    return getattr(proj.audio, "logmel")(sample)
""",
    "proj/late.py": """
def absolute(sample):
    from proj import audio
    return audio.logmel(sample)

def relative(sample):
    from .audio import logmel
    return logmel(sample)

def dotted(sample):
    import space.deep.tool
    return space.deep.tool.clip(sample)

def absent(sample):
    import nowhere.at_all
    from .... import beyond
""",
}


def project(folder: Path, changes: dict[str, tuple[str, str]], first: str = "") -> dict[str, dict[str, str]]:
    """Return the facts of all functions of PROJECT, written anew with changes, by name."""
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace(*changes.get(name, ("", ""))))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            for name in first.split():
                importlib.import_module(name)
            found = {}
            for module in map(importlib.import_module, ("proj.late", "proj.early")):
                functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
                found |= {fn.__name__: facts_of([1], fn, None, 0) for fn in functions}
                assert "proj.audio" not in sys.modules or first or module.__name__ == "proj.early"
            return found
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("proj", "space")]:
                del sys.modules[name]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"proj/audio.py": ("sample * RATE", "sample + RATE")},
            {
                "chained": "function: global proj.audio.logmel",
                "handed_on": "function: global proj.audio",
                "absolute": "function: module proj.audio",
                "relative": "function: module proj.audio",
            },
        ),
        (
            {"proj/rates.py": ("8000", "9000")},
            {
                "chained": "function: global proj.audio.logmel",
                "absolute": "function: module proj.rates",
                "relative": "function: module proj.rates",
            },
        ),
        (
            {"space/deep/tool.py": ("sample - 1", "sample - 2")},
            {"spaced": "function: global space.deep.tool.clip", "dotted": "function: module space.deep.tool"},
        ),
        ({"proj/audio.py": ("def logmel", "# as always\ndef logmel")}, {}),
    ],
    ids=["helper", "what it imports", "namespace", "comment"],
)
def test_what_lies_in_other_modules_is_part_of_the_key(tmp_path, changes, named):
    """Reached by dots, in a package without a file, or imported by the function when it runs."""
    there, here = project(tmp_path / "old", {}), project(tmp_path / "new", changes)
    found = {name: differences(there[name], here[name]) for name in there}
    assert {name for name, texts in found.items() if texts} == set(named)
    for name, text in named.items():
        assert any(each.startswith(text) for each in found[name]), found[name]


def test_whether_a_module_is_imported_already_is_no_part_of_the_key(tmp_path):
    """What a function imports is looked up and not imported, and told the same if it was."""
    assert project(tmp_path, {}) == project(tmp_path, {}, first="proj.audio space.deep.tool")


def test_a_module_that_was_edited_after_it_was_imported_late_is_not_what_will_run(tmp_path, monkeypatch):
    """While the old one is loaded it is told; once it is gone, the new one."""
    monkeypatch.syspath_prepend(tmp_path)

    def late(sample: int) -> Any:
        import late_and_edited

        return late_and_edited.go(sample)

    def told(text: str) -> dict[str, str]:
        (tmp_path / "late_and_edited.py").write_text(text)
        return facts_of([1], late, None, 0)

    old, new = "def go(x):\n    return x\n", "def go(x):\n    return -x\n"
    there = told(old)
    importlib.import_module("late_and_edited")
    assert told(old) == there
    edited = told(new)
    del sys.modules["late_and_edited"]
    assert there != edited != told(new) != there


@pytest.mark.slow
def test_the_key_is_the_same_in_another_process(tmp_path):
    """Whatever the order of sets there: of decorated functions, callable objects, modules, and what is in them."""
    (tmp_path / "made.py").write_text(SOURCE + "\nwords = lambda sample: sample in {'a', 'b', 'c'}, lambda x: x\n")
    program = (
        "import json, sys, torch, made; from holdfast.data.features.keys import facts_of; torch.manual_seed(0);"
        "each = [made.quiet, made.banked, made.closed, made.dispatched, made.remembered, made.Base(), made.Derived(),"
        "made.Settings(), made.Kind.MEL, made.Chain(made.Net(), torch.nn.Linear(2, 2)), made.words[0], made.Odd(),"
        "{'a', 'b', 'c'}.union];"
        "json.dump([facts_of([1], fn, None, 0) for fn in each], sys.stdout)"
    )
    keys = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
        keys.append(json.loads(done.stdout))
    assert keys[0] == keys[1]
    assert len({json.dumps(key) for key in keys[0]}) == len(keys[0])


def test_what_is_nested_deeply_or_holds_itself_is_told_in_short():
    """Neither endless nor longer than its parts: lists in lists, wide and deep."""
    wide: list[Any] = [1]
    for _ in range(60):
        wide = [wide, wide]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    wide.append(wide)
    facts = facts_of([1], abs, {"wide": wide, "deep": deep, "near": [[[[1]]]]}, 0)
    assert max(map(len, facts.values())) <= 100
    assert differences(facts, facts_of([1], abs, {"wide": wide, "deep": deep, "near": [[[[2]]]]}, 0))


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (__file__, True),
        (os.__file__, False),
        (torch.__file__, False),
        ("/home/me/.local/lib/python3.11/site-packages/x/y.py", False),
        ("/usr/lib/python3/dist-packages/x.py", False),
        ("/home/me/packages/x.py", True),
    ],
)
def test_what_is_installed_is_not_the_users_own(file, own):
    """Wherever it is installed."""
    assert is_own_file(file) == own


def test_comments_docstrings_and_layout_are_no_part_of_the_key(tmp_path):
    """A function that only looks different keeps its cache."""
    source = SOURCE.replace("'''Compute.'''", "'''Compute it.'''").replace("  # as always", "\n\n")
    assert loaded(tmp_path, SOURCE, "fn") == loaded(tmp_path, textwrap.dedent(source), "fn")
    source = SOURCE.replace("Remember.", "Remember it.")
    assert loaded(tmp_path, SOURCE, "remembered") == loaded(tmp_path, source, "remembered")


def test_two_lambdas_of_one_line_are_two(tmp_path):
    """Where the source does not tell two functions apart, their code does."""
    first, second = (lambda sample: sample + 1), (lambda sample: sample + 2)
    assert differences(facts_of([1], first, None, 0), facts_of([1], second, None, 0))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dataset": [1, 2, 3, 9]}, "dataset: sample 3 was 4 and is 9"),
        ({"dataset": [1, 2, 3]}, "dataset: length was 4 and is 3"),
        ({"parameters": {"n_mels": 40}}, "parameters: n_mels was 80 and is 40"),
        ({"parameters": None}, "parameters: n_mels was 80 and is gone"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"fn": functools.partial(round, ndigits=1)}, "function: argument ndigits was not there and is 1"),
    ],
    ids=str,
)
def test_a_stale_cache_is_an_error_that_names_what_differs(tmp_path, change, named):
    """Features of another dataset, function or parameters are never handed out; ``rebuild`` replaces them."""
    build([1, 2, 3, 4], round, tmp_path / "f.h5", parameters={"n_mels": 80}).close()
    how = {"dataset": [1, 2, 3, 4], "fn": round, "parameters": {"n_mels": 80}} | change
    with pytest.raises(LoaderError, match=named) as caught:
        build(path=tmp_path / "f.h5", **how)
    assert caught.value.rule == "H620"
    assert len(build(path=tmp_path / "f.h5", rebuild=True, **how)) == len(how["dataset"])


def test_dates_tell_datasets_apart():
    """Arrays of dates and of durations, which have no buffer, are samples as others are."""
    days = [np.array(["2020-01-01", day], "datetime64[D]") for day in ("2020-01-02", "2020-01-03")]
    found = differences(facts_of(days, abs, None, 0), facts_of([days[0], days[1] + 1], abs, None, 0))
    assert [text.partition(" was ")[0] for text in found] == ["dataset: sample 1"]


def test_tensors_tell_datasets_apart():
    """One changed bit in a sample that is looked at, or in a weight of the function, is another key."""
    samples = [torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)]
    there = facts_of(samples, torch.nn.Linear(2, 2), None, 0)
    samples[1] = samples[1].clone()
    samples[1][2] = 1e-30
    found = differences(there, facts_of(samples, torch.nn.Linear(2, 2), None, 0))
    assert any("dataset: sample 1" in text for text in found)
    assert any("attribute _parameters" in text for text in found)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_module_is_told_by_its_code_and_weights(tmp_path):
    """Loaded from a file it is the same before and after it is called; with other weights or code it is another."""
    path = str(tmp_path / "net.pt")

    def facts(net: torch.nn.Module, calls: int) -> dict[str, str]:
        torch.jit.save(torch.jit.script(net), path)
        loaded = torch.jit.load(path)
        for _ in range(calls):
            loaded(torch.ones(2))
        return facts_of([1], loaded, None, 0)

    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert facts(first, 0) == facts(first, 2)
    assert any("attribute weight" in text for text in differences(facts(first, 0), facts(second, 0)))
    found = differences(*(facts(torch.nn.Sequential(first, kind()), 0) for kind in (torch.nn.ReLU, torch.nn.Tanh)))
    assert [text.partition(" was ")[0] for text in found] == ["function: attribute code"]


def test_a_failing_item_is_named_and_what_came_before_is_kept(tmp_path, monkeypatch):
    """The error names the item, also for StopIteration; the next build computes from there on."""
    for workers in (0, 2):
        path = tmp_path / f"f{workers}.h5"
        monkeypatch.setenv("FAIL_AT", "17")
        with pytest.raises(LoaderError, match=r"item 17 of the dataset raised StopIteration: spoilt") as caught:
            build(range(40), doubled, path, num_workers=workers)
        assert caught.value.rule == "H623"
        told = "".join(getattr(caught.value, "__notes__", [])) or repr(caught.value.__cause__)
        assert "spoilt" in told
        with pytest.raises(LoaderError, match="not finished: its build was stopped after 17 items") as caught:
            FeatureCache(path)
        assert caught.value.rule == "H621"
        monkeypatch.delenv("FAIL_AT")
        assert list(build(range(40), doubled, path, num_workers=workers)) == [2 * index for index in range(40)]
    assert (tmp_path / "f0.h5").read_bytes() == (tmp_path / "f2.h5").read_bytes()


def test_an_unfinished_build_is_not_continued_by_another_function(tmp_path, monkeypatch):
    """Half of one function's features and half of another's is what nobody wants: an error, or a new start."""
    monkeypatch.setenv("FAIL_AT", "3")
    with pytest.raises(LoaderError, match="item 3"):
        build(range(5), doubled, tmp_path / "f.h5")
    with pytest.raises(LoaderError, match=r"the unfinished build of .* function: name was doubled") as caught:
        build(range(5), identity, tmp_path / "f.h5")
    assert caught.value.rule == "H620"
    assert list(build(range(5), identity, tmp_path / "f.h5", rebuild=True)) == list(range(5))


def test_the_old_cache_can_be_read_until_a_rebuild_is_complete(tmp_path, monkeypatch):
    """A rebuild that fails leaves the old file; the next build continues it; who had the old one open keeps it."""
    old = build(range(5), identity, tmp_path / "f.h5")
    monkeypatch.setenv("FAIL_AT", "3")
    with pytest.raises(LoaderError, match="item 3"):
        build(range(5), doubled, tmp_path / "f.h5", rebuild=True)
    assert list(FeatureCache(tmp_path / "f.h5")) == list(range(5))
    monkeypatch.setenv("FAIL_AT", "0")  # items 0 to 2 are not computed again
    assert list(build(range(5), doubled, tmp_path / "f.h5")) == [0, 2, 4, 6, 8]
    assert list(old) == list(range(5))
    old.close()
    with pytest.raises(LoaderError, match="was replaced by another one") as caught:
        old[0]
    assert caught.value.rule == "H620"


def test_a_rebuild_of_the_same_features_that_is_killed_is_continued(tmp_path, monkeypatch):
    """Who rebuilds does not trust the old file, although its key is the same: the next build does not return it."""
    build(range(5), doubled, tmp_path / "f.h5").close()
    old = (tmp_path / "f.h5").stat().st_ino
    monkeypatch.setenv("FAIL_AT", "3")
    with pytest.raises(LoaderError, match="item 3"):
        build(range(5), doubled, tmp_path / "f.h5", rebuild=True)
    monkeypatch.setenv("FAIL_AT", "0")  # items 0 to 2 are not computed again
    assert list(build(range(5), doubled, tmp_path / "f.h5")) == [0, 2, 4, 6, 8]
    assert (tmp_path / "f.h5").stat().st_ino != old


def test_a_cache_that_is_being_written_has_one_writer_and_no_reader(tmp_path):
    """While it is built, a reader and a second builder are told who builds, in this process and in another."""
    path, found = tmp_path / "f.h5", []

    def told() -> list[tuple[str, str]]:
        answers = []
        for attempt in (lambda: FeatureCache(path), lambda: build([1], identity, path)):
            with pytest.raises(LoaderError) as caught:
                attempt()
            answers.append((caught.value.rule, caught.value.what))
        return answers

    class Curious:
        def __call__(self, sample: int) -> int:
            if sample == 2:
                found.extend(told())
                with multiprocessing.get_context("fork").Pool(1) as pool:
                    found.extend(pool.apply(_in_a_child, (path, os.getpid())))
            return sample

    curious: Callable[[int], int] = Curious()
    assert list(build([1, 2, 3], curious, path)) == [1, 2, 3]
    assert len(found) == 4
    assert all(rule == "H621" and f"process {os.getpid()}" in what for rule, what in found), found


def _in_a_child(path: Path, parent: int) -> list[tuple[str, str]]:
    from holdfast.data.features.files import _held

    _held.clear()  # what a process that was not forked in the middle of a build would have
    assert os.getpid() != parent
    answers = []
    for attempt in (lambda: FeatureCache(path), lambda: build([1], identity, path)):
        try:
            attempt()
        except LoaderError as error:
            answers.append((error.rule, error.what))
    return answers


def test_a_flipped_bit_is_found_when_its_item_is_read(tmp_path):
    """The other items can be read; `verify` names the bad ones."""
    cache = build([torch.randn(50) for _ in range(6)], identity, tmp_path / "f.h5")
    cache.verify()
    flip_bit(tmp_path / "f.h5", 8 * (65536 + 900))
    bad = []
    for index in range(6):
        try:
            cache[index]
        except LoaderError as error:
            bad.append(index)
            rule = error.rule
    assert (len(bad), rule) == (1, "H622")
    with pytest.raises(LoaderError, match=rf"1 of 6 items do not match their digests \(items {bad[0]}\)"):
        cache.verify()


@pytest.mark.parametrize(
    ("content", "rule"),
    [(b"", "H622"), (b"no HDF5", "H622"), (None, "H625"), ("cut", "H622"), ("other", "H620")],
    ids=str,
)
def test_a_file_that_is_no_whole_cache_is_neither_read_nor_replaced(tmp_path, content, rule):
    """Empty, cut off, missing, or HDF5 of another kind: a clear error, and ``rebuild`` overwrites nothing foreign."""
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
            build([1], identity, path, rebuild=True)
        assert caught.value.rule == rule
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dataset": []}, "is empty"),
        ({"dataset": iter([1])}, "list_iterator"),
        ({"fn": 3}, "fn=3"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"parameters": [1]}, "parameters="),
        ({"multiprocessing_context": "threads"}, "multiprocessing_context='threads'"),
        ({"num_workers": 1, "multiprocessing_context": "spawn", "fn": lambda sample: sample}, "cannot be started"),
    ],
    ids=["dataset", "iterator", "fn", "num_workers", "parameters", "context", "spawn"],
)
def test_arguments_that_cannot_be_used_are_clear_errors(tmp_path, change, named):
    """Each is named, with what is expected."""
    with pytest.raises(LoaderError, match=named) as caught:
        build(**{"dataset": [1], "fn": identity, "path": tmp_path / "f.h5", **change})
    assert caught.value.rule == "H625"


def test_without_h5py_the_error_names_the_extra(tmp_path, monkeypatch):
    """Who has not installed h5py is told how."""
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(LoaderError, match=r"pip install 'holdfast\[features\]'"):
        build([1], identity, tmp_path / "f.h5")


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    """The system's reason is told."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LoaderError, match="Not a directory") as caught:
        build([1], identity, tmp_path / "file" / "f.h5")
    assert caught.value.rule == "H624"


def test_memory_is_bounded_by_the_window_and_not_by_the_dataset():
    """Workers run ahead of the reader by a window, however long the dataset is."""
    started = multiprocessing.get_context("fork").Value("i", 0)

    def fn(sample: int) -> int:
        with started.get_lock():
            started.value += 1
        return sample

    items = compute_in_workers(Work(range(100_000), fn, 0), range(100_000), 2, "fork")
    for _ in range(5):
        next(items)
    items.close()
    assert started.value <= 5 + 2 * feature_workers._WINDOW


def test_the_progress_is_shown_on_stderr(tmp_path, capfd):
    """The bar names the file and ends with all items; stdout stays clean."""
    build(range(12), identity, tmp_path / "f.h5", progress=True)
    captured = capfd.readouterr()
    assert "f.h5" in captured.err
    assert "12/12" in captured.err
    assert not captured.out


@pytest.mark.parametrize("at", ["_write_twin", "fsync", "rename"])
def test_a_build_that_is_stopped_while_it_is_finished_can_be_finished_later(tmp_path, monkeypatch, at):
    """With the structure half written around the items, nothing is lost and the file is the same."""
    build(range(20), noisy, tmp_path / "whole.h5").close()

    def refuse(*_: Any) -> None:
        raise (RuntimeError if at == "_write_twin" else OSError)(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr({"_write_twin": Draft, "fsync": os, "rename": Path}[at], at, refuse)
        with pytest.raises(LoaderError, match="No space left on device") as caught:
            build(range(20), noisy, tmp_path / "f.h5")
    assert caught.value.rule == "H624"
    assert not (tmp_path / "f.h5").exists()
    build(range(20), noisy, tmp_path / "f.h5").close()
    assert (tmp_path / "f.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_what_a_builder_left_that_was_killed_at_the_very_end_is_removed(tmp_path):
    """A folder of a build whose file has its name already is cleared away by the next build."""
    build([1, 2], identity, tmp_path / "f.h5").close()
    left = tmp_path / "f.h5.building"
    left.mkdir()
    (left / "journal").write_bytes(b"rest")
    assert list(build([1, 2], identity, tmp_path / "f.h5")) == [1, 2]
    assert not left.exists()
