"""The variables of a script are saved without pickle, and restored in place."""

from __future__ import annotations

import collections
import enum
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.core.errors import HoldfastError
from holdfast.guard.unchanged.frames import is_script_file
from holdfast.guard.unchanged.variables.kinds import storage_address
from holdfast.guard.unchanged.variables.large_data import LargeData
from holdfast.guard.unchanged.variables.reader import VariableReader
from holdfast.guard.unchanged.variables.writer import VariableWriter


class Phase(enum.Enum):
    TRAIN = 1
    TEST = 2


class Meter:
    """A class of the script."""

    best = 0.0

    def __init__(self) -> None:
        self.values: list[float] = []
        self.count = 0


class Lazy(torch.nn.Module):
    """A module with state that its ``state_dict`` lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.calls = 0
        self.register_buffer("cache", torch.zeros(2), persistent=False)


class Row(NamedTuple):
    step: int
    losses: list[float]


class Slotted:
    """A class of the script without a dict of attributes."""

    __slots__ = ("count", "values")

    def __init__(self) -> None:
        self.count = 0
        self.values: list[float] = []


def halved(value: float) -> float:
    return value / 2


@dataclass(frozen=True)
class Settings:
    """A class of the script whose instances do not change."""

    decay: Callable[[float], float]
    lr: float
    sizes: list[int]


class Shared:
    """A class of the script whose attributes are the state of its run."""

    mean = torch.zeros(2)
    best = np.float64(0.0)


def through_a_checkpoint(tree: Any) -> Any:
    """Return a tree as a checkpoint returns it."""
    encoder = Encoder("script")
    encoded = encoder.encode(tree)
    return decode(encoded, {name: tensor.clone() for name, tensor in encoder.tensors.items()})


def saved(value: Any, held: frozenset[int] = frozenset()) -> Any:
    return through_a_checkpoint(VariableWriter(held, LargeData()).saved(value))


@pytest.mark.parametrize(
    "value",
    [
        7,
        2.5,
        "text",
        None,
        True,
        [1.0, 2.0],
        [[1], {"a": (2, None)}],
        {1, 2},
        frozenset({"a"}),
        {("a", 1): [3]},
        collections.deque([1, 2]),
        collections.Counter("aab"),
        Phase.TEST,
        np.float32(2.5),
        Row(3, [0.5]),
    ],
)
def test_values_are_restored(value: Any) -> None:
    """A value of any of these kinds comes back equal, in place of another one."""
    assert VariableReader().value_of(saved(value), "something else") == value


def test_containers_that_do_not_exist_yet_get_their_types() -> None:
    """A deque does not grow beyond its limit after the resume, and a Counter counts new keys."""
    recent = collections.deque([1, 2], maxlen=2)
    counts = collections.Counter("aab")

    restored_recent, restored_counts = VariableReader().value_of(saved([recent, counts]), None)
    restored_recent.append(3)
    restored_counts["c"] += 1

    assert list(restored_recent) == [2, 3]
    assert restored_counts == {"a": 2, "b": 1, "c": 1}


def test_objects_are_restored_in_place() -> None:
    """Whoever refers to a list, a tensor or an object of the script sees the restored values."""
    meter = Meter()
    meter.values = [1.0, 2.0]
    meter.count = 2
    weights = torch.arange(3.0)
    array = np.arange(3)
    tree = saved([meter, weights, array])
    values = meter.values
    meter.values.append(3.0)
    meter.count = 9
    weights.zero_()
    array[:] = 0

    restored = VariableReader().value_of(tree, [meter, weights, array])

    assert restored[0] is meter
    assert restored[1] is weights
    assert meter.values is values
    assert (meter.values, meter.count) == ([1.0, 2.0], 2)
    assert weights.tolist() == [0.0, 1.0, 2.0]
    assert array.tolist() == [0, 1, 2]


def test_objects_that_occur_twice_stay_one_object() -> None:
    """Two variables that refer to one list refer to one list after the resume."""
    shared = [1]

    first, second = VariableReader().value_of(saved([shared, shared]), None)

    assert first is second


def test_enum_member_in_two_variables_is_restored_in_both() -> None:
    """The second variable does not keep the member that it has at the start of the script."""
    tree = saved([Phase.TEST, Phase.TEST])

    restored = VariableReader().value_of(tree, [Phase.TRAIN, Phase.TRAIN])

    assert restored == [Phase.TEST, Phase.TEST]


def test_random_generators_continue() -> None:
    """A generator that the script keeps draws the same numbers again."""
    generators = [
        torch.Generator().manual_seed(1),
        np.random.default_rng(1),
        random.Random(1),
        np.random.RandomState(1),
    ]
    tree = saved(generators)

    def draw() -> list[float]:
        torch_generator, *others = generators
        assert isinstance(torch_generator, torch.Generator)
        drawn = [generator.random() for generator in others]
        return [torch.rand((), generator=torch_generator).item(), *drawn]

    drawn = draw()
    VariableReader().value_of(tree, generators)

    assert draw() == drawn


def test_module_keeps_what_its_state_dict_lacks() -> None:
    """Attributes, non-persistent buffers and the mode of a module are restored."""
    module = Lazy()
    module.calls = 4
    module.cache.fill_(2.0)
    module.eval()
    tree = saved(module)
    module.train()
    module.calls = 0
    module.cache.zero_()

    VariableReader().value_of(tree, module)

    assert (module.calls, module.training, module.linear.training) == (4, False, False)
    assert module.cache.tolist() == [2.0, 2.0]


class Config(dict):  # type: ignore[type-arg] # as scripts do
    """A dict of the script with attributes."""


class History(list):  # type: ignore[type-arg] # as scripts do
    """A list of the script with attributes."""


class Shuffled(torch.utils.data.Sampler[int]):
    """A sampler whose order depends on how often it was iterated."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter([(index + self.epoch) % 4 for index in range(4)])


def test_class_derived_from_dict_keeps_its_entries() -> None:
    """Entries and attributes of such an object are restored in place."""
    config = Config(lr=0.1)
    config.epoch = 3  # type: ignore[attr-defined]
    tree = saved(config)
    config["lr"] = 9.0
    config["new"] = 1
    config.epoch = 0  # type: ignore[attr-defined]

    restored = VariableReader().value_of(tree, config)

    assert restored is config
    assert (dict(config), config.epoch) == ({"lr": 0.1}, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [lambda: Config(lr=0.1), lambda: History([0.1])])
def test_class_derived_from_a_container_stays_one_object(make: Any) -> None:
    """Two variables that refer to such an object refer to it after the resume, not to its items."""
    value = make()

    first, second = VariableReader().value_of(saved([value, value]), [value, None])

    assert first is value
    assert second is value


def test_sampler_of_the_script_continues() -> None:
    """The attributes of a sampler that the script defines are part of its loader's state."""
    loader = torch.utils.data.DataLoader(list(range(4)), sampler=Shuffled())
    list(loader)
    tree = saved(loader)
    expected = list(loader)
    list(loader)

    VariableReader().value_of(tree, loader)

    assert list(loader) == expected


def test_frozen_objects_keep_attributes_that_are_not_saved() -> None:
    """A frozen dataclass with a function keeps it, whether its other values differ or not."""
    same = Settings(halved, 0.1, [1])
    other = Settings(halved, 0.2, [1])
    tree = saved([Settings(halved, 0.1, [2]), Settings(halved, 0.1, [2])])

    restored = VariableReader().value_of(tree, [same, other])

    assert restored[0] is same
    assert restored == [Settings(halved, 0.1, [2]), Settings(halved, 0.1, [2])]


def test_counter_on_a_module_of_torch_is_restored() -> None:
    """Scripts keep counters in attributes such as ``model.global_step``."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2))
    model.global_step = 7
    held = frozenset(map(id, [model, *model.parameters()]))
    state = saved(model, held)

    model.global_step = 0
    VariableReader(held).value_of(state, model)

    assert model.global_step == 7


class SlowWeights(torch.optim.SGD):
    """An optimizer of the script, with state that its ``state_dict`` lacks."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, 0.1)
        self.calls = 0
        self.slow = [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("make", [SlowWeights, lambda parameters: torch.optim.SGD(parameters, 0.1)])
def test_optimizer_keeps_what_its_state_dict_lacks(make: Any) -> None:
    """The guard saves only the ``state_dict`` of an optimizer."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, restarted = make([weight]), make([weight])
    optimizer.calls = 7
    if isinstance(optimizer, SlowWeights):
        optimizer.slow[0] += 3
    groups = restarted.param_groups
    state = saved(optimizer, frozenset({id(optimizer), id(weight)}))

    VariableReader(frozenset({id(restarted), id(weight)})).value_of(state, restarted)

    assert restarted.calls == 7
    assert restarted.param_groups is groups
    if isinstance(restarted, SlowWeights):
        assert restarted.slow[0].tolist() == [3, 3]


def test_modules_of_the_guard_are_left_to_it() -> None:
    """The weights of a model that the guard saves are not saved twice."""
    module = torch.nn.Linear(2, 2)
    held = frozenset(map(id, [module, *module.parameters()]))

    tree = saved(module, held)

    assert tree["kind"] == "module"
    assert tree["state"] is None


def test_large_data_is_saved_only_after_it_has_changed() -> None:
    """A data set in memory is not written into each checkpoint."""
    data = torch.zeros(100_000)
    labels = np.zeros(100_000)
    large = LargeData()
    large.is_recording = True
    VariableWriter(frozenset(), large).saved([data, labels])
    large.is_recording = False

    unchanged = VariableWriter(frozenset(), large).saved([data, labels])
    data[0] = 1.0
    labels[0] = 1.0
    changed = VariableWriter(frozenset(), large).saved([data, labels])

    assert [tree["kind"] for tree in unchanged["items"]] == ["unchanged", "unchanged"]
    assert [tree["kind"] for tree in changed["items"]] == ["tensor", "array"]


@pytest.mark.parametrize("size", [2, 40_000])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda size: torch.eye(2).expand(size, 2, 2).to_sparse(),
        lambda size: torch.nested.nested_tensor([torch.ones(size), torch.ones(3)]),
        lambda _: torch.nn.UninitializedParameter(),
        lambda size: torch.empty(size, device="meta"),
        lambda size: np.ones(size, np.complex64),
        lambda size: np.ones(size, np.longdouble),
        lambda size: np.ones(size, ">f4"),
        lambda size: np.ma.array(np.ones(size), mask=False),
    ],
    ids=["sparse", "nested", "lazy", "meta", "complex", "long", "big-endian", "masked"],
)
def test_value_that_no_checkpoint_can_store_is_omitted(
    make: Callable[[int], Any], size: int
) -> None:
    """Such a variable neither stops the script nor its saves, and keeps its value in a resume."""
    value = make(size)
    large = LargeData()
    large.is_recording = True
    VariableWriter(frozenset(), large).saved(value)
    large.is_recording = False

    tree = through_a_checkpoint(VariableWriter(frozenset(), large).saved(value))

    assert tree["kind"] == "omitted"
    assert VariableReader().value_of(tree, value) is value


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(20_000, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(20_000))],
    ids=["conj", "neg"],
)
def test_lazy_view_is_recognized_as_unchanged(tensor: torch.Tensor) -> None:
    """A large tensor whose conjugate or negative is not computed yet is compared by its values."""
    large = LargeData()
    large.is_recording = True
    VariableWriter(frozenset(), large).saved(tensor)
    large.is_recording = False

    assert VariableWriter(frozenset(), large).saved(tensor) == {"kind": "unchanged"}


def test_local_variables_of_a_running_function_are_restored() -> None:
    """Variables are assigned in the function itself, also those that do not exist yet."""

    def train(restore_from: Any = None) -> Any:
        count = 0
        best = None
        if restore_from is None:
            count = 41
            best = [0.5]
            return VariableWriter(frozenset(), LargeData()).write(
                [sys._getframe()], frozenset({"best"})
            )
        VariableReader().restore(restore_from, [sys._getframe()])
        return count, best

    tree = train()
    space = next(space for space in tree if space.endswith("train"))
    assert "best" not in tree[space]
    tree[space]["best"] = {"kind": "list", "id": 0, "items": [0.75]}

    assert train(tree) == (41, [0.75])


def test_values_that_no_checkpoint_can_store_are_left_alone() -> None:
    """An array of dates or a function does not keep the other variables from being saved."""
    dates = np.array(["2026-11-30"], dtype="datetime64[D]")

    restored = VariableReader().value_of(
        saved([dates, np.datetime64("NaT"), print, 3]), [1, 2, 3, 4]
    )

    assert restored == [1, 2, 3, 3]


def test_installed_packages_are_not_part_of_the_script(tmp_path: Path) -> None:
    """Packages in any folder into which pip has installed them are libraries."""
    assert is_script_file(str(tmp_path / "train.py"))
    assert not is_script_file(str(tmp_path / "site-packages" / "package" / "module.py"))
    assert not is_script_file(torch.__file__)


def test_containers_that_the_loop_creates_have_their_kind() -> None:
    """A meter that exists only since the loop runs has its limit and makes new entries."""
    stats: Any = collections.defaultdict(lambda: collections.defaultdict(list))
    stats["train"]["loss"].append(0.5)
    trees = saved([collections.deque([1, 2], maxlen=2), collections.Counter("aab"), stats])
    live: Any = collections.defaultdict(lambda: collections.defaultdict(list))

    window, counts, restored = VariableReader().value_of(trees, [None, None, live])
    window.append(3)
    counts.update("b")
    restored["train"]["accuracy"].append(1.0)

    assert list(window) == [2, 3]
    assert counts == {"a": 2, "b": 2}
    assert restored == {"train": {"loss": [0.5], "accuracy": [1.0]}}


def test_attributes_in_slots_are_restored() -> None:
    """An object without a dict is restored in place like any other."""
    state = Slotted()
    state.count = 3
    state.values = [0.5]
    tree = saved(state)
    fresh = Slotted()

    restored = VariableReader().value_of(tree, fresh)

    assert restored is fresh
    assert (fresh.count, fresh.values) == (3, [0.5])


def new_function() -> Any:
    total = 0.0

    def add(value: float, history: list[float] = []) -> float:  # noqa: B006 - as scripts do
        nonlocal total
        total += value
        history.append(value)
        add.calls += 1  # type: ignore[attr-defined]
        return total

    add.calls = 0  # type: ignore[attr-defined]
    return add


def test_variables_of_functions_are_restored() -> None:
    """The closure, the attributes and the mutable defaults of a function continue."""
    add = new_function()
    add(1.0)
    add(2.0)
    tree = saved(add)
    fresh = new_function()

    VariableReader().value_of(tree, fresh)

    assert fresh(4.0) == 7.0
    assert fresh.calls == 3
    assert fresh.__defaults__ == ([1.0, 2.0, 4.0],)


def test_attributes_of_classes_are_restored() -> None:
    """A class may hold tensors and NumPy numbers, not only plain ones."""
    Shared.mean = torch.ones(2)
    Shared.best = np.float64(0.5)
    tree = saved(Shared)
    Shared.mean = torch.zeros(2)
    Shared.best = np.float64(0.0)

    VariableReader().value_of(tree, Shared)

    assert Shared.mean.tolist() == [1.0, 1.0]
    assert Shared.best == 0.5


@pytest.mark.parametrize("first", ["nothing", "the model"])
def test_copy_of_a_model_is_made_again(first: str) -> None:
    """The best model so far, which the loop has copied, does not overwrite the trained one."""
    model = torch.nn.Linear(2, 2)
    held = frozenset(map(id, [model, *model.parameters()]))
    best = torch.nn.Linear(2, 2)
    tree = saved(best, held)
    before = model.weight.detach().clone()

    restored = VariableReader(held, [model]).value_of(tree, None if first == "nothing" else model)

    assert restored is not model
    assert torch.equal(restored.weight, best.weight)
    assert torch.equal(model.weight, before)


def test_module_that_cannot_be_made_again_is_refused() -> None:
    """A variable that keeps None instead of a module would change what the script does."""
    tree = saved(torch.nn.Linear(2, 2))

    with pytest.raises(HoldfastError, match="H739"):
        VariableReader().value_of(tree, None)


def test_objects_that_were_one_at_first_become_two() -> None:
    """The best history does not overwrite the current one, with which it began."""
    tree = saved([[1.0, 2.0, 3.0], [1.0]])
    same: list[float] = []

    history, best = VariableReader().value_of(tree, [same, same])

    assert history == [1.0, 2.0, 3.0]
    assert best == [1.0]


def test_copied_weights_do_not_overwrite_the_model() -> None:
    """Best weights that began as the model's own ``state_dict`` get tensors of their own."""
    model = torch.nn.Linear(2, 2)
    addresses = [storage_address(parameter) for parameter in model.parameters()]
    held = frozenset(address for address in addresses if address is not None)
    tree = saved({name: torch.ones_like(value) for name, value in model.state_dict().items()}, held)
    before = model.weight.detach().clone()

    best = VariableReader(held).value_of(tree, model.state_dict())

    assert torch.equal(best["weight"], torch.ones(2, 2))
    assert torch.equal(model.weight, before)


def test_change_that_torch_does_not_count_is_noticed() -> None:
    """An average that is updated through ``data`` is saved."""
    average = torch.zeros(100_000)
    large = LargeData()
    large.is_recording = True
    VariableWriter(frozenset(), large).saved(average)
    large.is_recording = False

    average.data.add_(1.0)

    assert VariableWriter(frozenset(), large).saved(average)["kind"] == "tensor"


class Counting(torch.utils.data.Dataset[int]):
    """A dataset that counts its samples."""

    def __init__(self) -> None:
        self.served = 0
        self.samples = [1, 2, 3]


def test_numbers_of_a_dataset_are_restored() -> None:
    """A counter and a short list in a dataset continue."""
    data = Counting()
    data.served = 7
    data.samples.append(4)
    tree = saved(data)
    fresh = Counting()

    VariableReader().value_of(tree, fresh)

    assert fresh.served == 7
    assert fresh.samples == [1, 2, 3, 4]


def test_samples_of_a_dataset_are_saved_once_they_change() -> None:
    """A long list is data that the script makes again, unless it or a tensor in it has changed."""
    data = Counting()
    data.samples = [torch.zeros(2), *range(20_000)]
    large_data = LargeData()
    large_data.is_recording = True
    VariableWriter(frozenset(), large_data).saved(data)
    large_data.is_recording = False

    def saved_samples() -> Any:
        return VariableWriter(frozenset(), large_data).saved(data)["attributes"]["samples"]

    assert saved_samples() == {"kind": "unchanged"}
    data.samples[0].add_(1)
    assert len(saved_samples()["items"]) == 20_001
    data.samples[0] = torch.zeros(2)
    data.samples.append(5)
    assert len(saved_samples()["items"]) == 20_002
