"""The parts of the observer by themselves.

Waiting for imports, exceptions as facts, values, steps, files.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.importing import ImportWatch
from holdfast.recorder import progress
from holdfast.recorder.progress import ProcessPhase, ProgressBoard, SampleRing, read_samples
from holdfast.recorder.run_files import (
    PROCESSES_FOLDER,
    ProcessInfo,
    read_optimizers,
    read_processes,
    write_process,
)
from holdfast.supervise.observe import step_tracker, training_phases
from holdfast.supervise.observe.launchers import is_launcher
from holdfast.supervise.observe.step_tracker import StepTracker
from holdfast.supervise.observe.values import PendingValue, ValueReader

# Imports ---
# ------------------------------------------------------------------------


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    (tmp_path / "waited_for.py").write_text("loader = __loader__\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield ImportWatch(lambda error: failures.append(error))
    sys.modules.pop("waited_for", None)
    failures.clear()


failures: list[BaseException] = []


def test_an_act_is_done_once_after_the_import(watch: ImportWatch) -> None:
    """A module is complete when its act is done, was given its own loader before it ran, and is
    not wrapped again.
    """
    seen: list[ModuleType] = []
    watch.when_imported("waited_for", lambda module: seen.append((module, module.value)))
    assert seen == []
    module = importlib.import_module("waited_for")
    assert seen == [(module, 1)]
    assert module.loader is module.__loader__ is module.__spec__.loader
    assert type(module.loader).__name__ == "SourceFileLoader"
    assert importlib.reload(module) is module
    assert len(seen) == 1


def test_a_module_may_have_several_actions(watch: ImportWatch) -> None:
    """They are called in the order in which they were registered, even if one of them fails."""
    called: list[str] = []

    def fail(_: ModuleType) -> None:
        raise ValueError("for the test")

    watch.when_imported("waited_for", lambda _: called.append("first"))
    watch.when_imported("waited_for", fail)
    watch.when_imported("waited_for", lambda _: called.append("last"))

    importlib.import_module("waited_for")

    assert called == ["first", "last"]
    assert [str(error) for error in failures] == ["for the test"]


def test_a_look_for_a_module_is_no_import(watch: ImportWatch) -> None:
    """Asking whether a module is there gives a usable answer and does not use up the act."""
    seen: list[ModuleType] = []
    watch.when_imported("waited_for", seen.append)
    spec = importlib.util.find_spec("waited_for")
    assert spec is not None
    assert spec.loader.get_source("waited_for") == "loader = __loader__\nvalue = 1\n"
    assert seen == []
    importlib.import_module("waited_for")
    assert len(seen) == 1


# --- values
# ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@given(number=st.floats(width=32))
def test_a_value_is_read_bit_by_bit(dtype: torch.dtype, number: float) -> None:
    """What is read from memory is what torch says, NaN and infinities included."""
    tensor = torch.tensor([number, number], dtype=dtype)[1]
    found = ValueReader(torch).read(tensor)
    assert isinstance(found, float)
    assert found == tensor.item() or (math.isnan(found) and math.isnan(tensor.item()))


def _read_values_of_ranks() -> list[Any]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole, part = (
            DTensor.from_local(torch.tensor(3.5), mesh, [kind], run_check=False)
            for kind in (Replicate(), Partial())
        )
        reader = ValueReader(torch)
        return [
            reader.read(whole),
            reader.read(part),
            reader.all_zero([whole * 0]),
            reader.all_zero([whole]),
        ]
    finally:
        distributed.destroy_process_group()


def test_a_value_that_all_ranks_hold_is_read_and_a_part_of_one_is_not() -> None:
    """A loss under tensor parallelism is a DTensor; of one in parts the ranks are not asked."""
    # In a thread that ends: torch keeps the group in a cache of the thread, and a fork in another
    # one would destroy it there, and join threads that a fork does not have.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_read_values_of_ranks).result() == [3.5, None, True, False]


def test_what_has_no_value_is_not_touched() -> None:
    """Several elements, integers, sparse and meta tensors, subclasses and wrapped tensors give
    None.
    """

    class Touchy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("touched")

    reader = ValueReader(torch)
    assert reader.read(torch.ones(2)) is None
    assert reader.read(torch.ones((), dtype=torch.int64)) is None
    assert reader.read(torch.ones((), device="meta")) is None
    assert reader.read(torch.ones(1).to_sparse()) is None
    assert reader.read(torch.ones(1).as_subclass(Touchy)) is None
    assert reader.read("loss") is None
    inside: list[Any] = []
    torch.func.vmap(lambda each: inside.append(reader.read(each)) or each)(torch.ones(3))
    assert inside[0] is None


def test_reading_is_seen_by_no_mode_and_no_profiler() -> None:
    """A script that looks at every call to torch does not see that a loss was read."""
    seen: list[Any] = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Operations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    reader = ValueReader(torch)
    with Functions(), Operations(), torch.profiler.profile() as profile:
        assert reader.read(loss) == 6.0
    assert seen == []
    assert [event.name for event in profile.events() if event.name.startswith("aten::")] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_value_on_a_gpu_comes_later() -> None:
    """A loss on a GPU is not waited for: it is a promise, kept once the stream has come so far."""
    reader = ValueReader(torch)
    found = reader.read((torch.ones(3, device="cuda", requires_grad=True) * 2).sum())
    assert isinstance(found, PendingValue)
    torch.cuda.synchronize()
    assert found.has_arrived()
    assert found.value() == 6.0


# --- steps
# ------------------------------------------------------------------------


class Seen:
    """Stands for the observer: real files, no process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "board"
        self.board = ProgressBoard(self.path)
        self.ring = folder / "samples"
        self.settings: dict[str, Any] = {}
        self._samples = SampleRing(self.ring)
        self.roles: list[str] = []
        self.failures: list[BaseException] = []
        self.events: list[Any] = []
        self.emit = self.events.append

    def open_samples(self) -> SampleRing:
        return self._samples

    def write_settings(self, settings: dict[str, Any]) -> None:
        self.settings = dict(settings)

    def set_role(self, role: str) -> None:
        self.roles.append(role)

    def note_error(self, error: BaseException) -> None:
        self.failures.append(error)


class Optimizer:
    """As much of an optimizer as a hook looks at."""

    def __init__(self, rate: Any = 0.5) -> None:
        self.param_groups = [{"lr": rate}]


@pytest.fixture
def seen(tmp_path: Path) -> Any:
    found = Seen(tmp_path)
    yield found
    assert found.failures == []


def steps_of(seen: Seen, *, optimizer: bool = True) -> StepTracker:
    return StepTracker(seen, torch, lambda: optimizer)  # type: ignore[arg-type]


def backward(steps: StepTracker, loss: float = 1.0) -> None:
    steps.backward_begins(torch.tensor(loss))
    steps.backward_ends()


def step(steps: StepTracker, optimizer: Any) -> None:
    steps.optimizer_begins(optimizer, (optimizer,), {})
    steps.optimizer_ends(optimizer, (optimizer,), {})


def test_the_phases_of_a_loop(seen: Seen) -> None:
    """Waiting, training, an epoch's end, evaluation and saving are told apart.

    The first step is one of its own.
    """
    steps = steps_of(seen)
    phases = [seen.board.phase]
    judge = Optimizer()

    def does(method: Any, *args: Any) -> None:
        method(*args)
        phases.append(seen.board.phase)

    for _ in range(2):
        does(steps.wait_begins)
        does(steps.wait_ends, None)
        does(steps.backward_begins, None)
        does(steps.backward_ends)
        does(steps.optimizer_begins, judge, (judge,), {})
        does(steps.optimizer_ends, judge, (judge,), {})
    does(steps.phases.interruption_begins, ProcessPhase.SAVING)
    does(steps.phases.interruption_ends)
    does(steps.phases.evaluation_begins)
    does(steps.wait_begins)
    does(steps.wait_ends, ProcessPhase.EVALUATION)
    does(steps.wait_ends, ProcessPhase.END_OF_EPOCH)
    first, usual = ProcessPhase.FIRST_STEP, ProcessPhase.FORWARD_BACKWARD
    assert phases == [
        ProcessPhase.STARTING,
        *(ProcessPhase.DATA_WAIT, first, first, first, first, usual),
        *(ProcessPhase.DATA_WAIT, usual, usual, usual, ProcessPhase.OPTIMIZER, usual),
        *(
            ProcessPhase.SAVING,
            usual,
            ProcessPhase.EVALUATION,
            ProcessPhase.DATA_WAIT,
            ProcessPhase.EVALUATION,
            ProcessPhase.END_OF_EPOCH,
        ),
    ]
    assert seen.roles == ["trainer"]


@pytest.mark.parametrize("calls_train", [True, False])
def test_what_a_loop_spends_its_time_on_adds_up(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, *, calls_train: bool
) -> None:
    """Loading for an evaluation is evaluation, saving within one is saving, and the first step
    does not count.
    """
    now = [1]

    def pass_seconds(seconds: float) -> None:
        now[0] += round(1e9 * seconds)

    for module in (progress, step_tracker, training_phases):
        name = "monotonic_ns" if module is training_phases else "_now"
        monkeypatch.setattr(module, name, lambda: now[0])
    steps, one = steps_of(seen), Optimizer()

    def wait(seconds: float) -> None:
        steps.wait_begins()
        pass_seconds(seconds)
        steps.wait_ends(None)

    def train_one_step() -> None:
        wait(3.0)
        pass_seconds(0.25)
        steps.backward_begins(torch.tensor(1.0))
        pass_seconds(1.0)
        steps.backward_ends()
        steps.optimizer_begins(one, (one,), {})
        pass_seconds(0.5)
        steps.optimizer_ends(one, (one,), {})

    pass_seconds(100.0)
    train_one_step()
    train_one_step()
    steps.phases.evaluation_begins()
    wait(5.0)
    pass_seconds(2.0)
    steps.phases.interruption_begins(ProcessPhase.SAVING)
    pass_seconds(4.0)
    steps.phases.interruption_ends()
    if calls_train:
        steps.phases.evaluation_ends()
    train_one_step()

    standing = progress.read_board(seen.path)
    assert standing is not None
    assert standing.loop == progress.LoopTimes(
        steps=2,
        evaluations=1,
        saves=1,
        seconds=20.5,
        wait_seconds=6.0,
        evaluation_seconds=7.0,
        saving_seconds=4.0,
        backward_seconds=2.0,
        optimizer_seconds=1.0,
    )
    assert standing.loop.own_share == pytest.approx(0.5 / 20.5)


def test_fast_steps_are_read_now_and_then(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first 1000 steps each loss is read, then one in 2 ms, of a step whole.

    A NaN that stays is seen.
    """
    nanoseconds = itertools.count(1, 100_000)
    monkeypatch.setattr(progress, "_now", lambda: next(nanoseconds))  # four times a step
    steps, one = steps_of(seen), Optimizer()
    for number in range(1, 1101):
        steps.wait_begins()
        steps.wait_ends(None)
        backward(steps, math.nan if number > 1050 else 1.0)
        steps.norm_computed(torch.tensor(2.0))
        step(steps, one)
    samples = read_samples(seen.ring)
    assert [each.step for each in samples] == [*range(1, 1101)]
    assert {each.loss for each in samples[:1000]} == {1.0}
    read = [each for each in samples[1000:] if each.loss is not None]
    assert [each for each in samples[1000:] if each.grad_norm is not None] == read
    assert [later.step - earlier.step for earlier, later in itertools.pairwise(read)] == [4] * (
        len(read) - 1
    )
    assert [math.isnan(each.loss) for each in read] == [each.step > 1050 for each in read]


def test_a_step_takes_few_calls(seen: Seen) -> None:
    """Between the operations of a small step our code is cold, and each call of it costs a
    microsecond or more.
    """
    steps, one, loss = steps_of(seen), Optimizer(), torch.tensor(1.0)
    calls: list[list[str]] = [[] for _ in range(6)]

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            calls[number].append(frame.f_code.co_name)

    for number in range(6):  # the first opens and decides things; one that is slow looks at more
        sys.setprofile(look if number else None)
        steps.wait_begins()
        steps.wait_ends(None)
        steps.backward_begins(loss)
        steps.backward_ends()
        steps.norm_computed(loss)
        steps.optimizer_begins(one, (one,), {})
        steps.optimizer_ends(one, (one,), {})
    sys.setprofile(None)
    assert min(map(len, calls[1:])) <= 20, calls
    assert read_samples(seen.ring)[1].grad_norm == 1.0


def test_a_norm_is_that_of_the_newest_gradients(seen: Seen) -> None:
    """It is recorded with the step whose backward made them, also where that step has ended
    before it is computed.
    """
    steps, one, other = steps_of(seen, optimizer=False), Optimizer(), Optimizer()
    for norm in (1.0, 2.0):  # a step written by hand
        backward(steps)
        steps.norm_computed(torch.tensor(norm))
    backward(steps)
    step(steps, one)
    steps.norm_computed(torch.tensor(3.0))  # for the parameters of the other, or for a log
    step(steps, other)
    backward(steps)
    steps.norm_computed(torch.tensor(4.0))
    step(steps, one)
    assert [each.grad_norm for each in read_samples(seen.ring)] == [1.0, 2.0, 3.0, 4.0]
    seen.board = ProgressBoard(seen.path)
    without = steps_of(seen)
    for norm in (5.0, 6.0):  # gradients of autograd.grad, or of a formula
        without.norm_computed(torch.tensor(norm))
        step(without, one)
    assert [each.grad_norm for each in read_samples(seen.ring)][4:] == [5.0, 6.0]


def test_a_step_that_only_makes_state_is_none(seen: Seen) -> None:
    """A rate of 0 and gradients of 0 without a backward, whenever that is.

    Zeros before the first gradients.
    """
    steps, model = steps_of(seen), torch.nn.Linear(2, 2)
    adam, sgd = (
        torch.optim.Adam(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )

    def makes_state(optimizer: torch.optim.Optimizer, rate: Any) -> None:
        phase = seen.board.phase
        before = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step(steps, optimizer)
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = before
        assert seen.board.phase is phase

    makes_state(adam, 0.0)
    makes_state(sgd, 0.1)
    step(steps, adam)  # of no gradients, so that a scheduler does not warn
    assert seen.roles == []
    for _ in range(2):
        backward(steps)
        step(steps, sgd)
        steps.phases.interruption_begins(ProcessPhase.SAVING)
        makes_state(sgd, 0.0)
        makes_state(sgd, torch.tensor(0.0))
        steps.phases.interruption_ends()
    model.weight.grad = torch.ones_like(model.weight)  # of a formula
    step(steps, sgd)
    first, second, _ = [
        (each.step, each.micro_steps, each.loss) for each in read_samples(seen.ring)
    ]
    assert (first, second) == ((1, 1, 1), (2, 1, 1))
    assert [(each.step, each.learning_rate) for each in read_samples(seen.ring)] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.1),
    ]


def test_the_optimizer_that_stepped_is_recorded_with_a_name(seen: Seen) -> None:
    """Losses of two players can be told apart.

    A step has the number of its optimizer, and a file the names.
    """
    steps, one, other = steps_of(seen), Optimizer(), Optimizer()
    for loss, optimizer in ((1.0, one), (9.0, other), (2.0, one), (8.0, other)):
        backward(steps, loss)
        step(steps, optimizer)
    assert [each.optimizer for each in read_samples(seen.ring)] == [1, 2, 1, 2]
    assert read_optimizers(seen.ring.parent) == ["Optimizer 1", "Optimizer 2"]


def test_an_optimizer_that_is_never_seen_to_step(seen: Seen) -> None:
    """Where an optimizer was made and its hooks do not run, calls of backward become steps after
    a while.
    """
    steps = steps_of(seen)
    for _ in range(260):
        backward(steps)
    samples = read_samples(seen.ring)
    assert [(each.step, each.micro_steps) for each in samples] == [(1, 257), (2, 1), (3, 1), (4, 1)]


def test_a_scaled_loss_is_recorded_without_its_scale(seen: Seen) -> None:
    """The loss before a scaler is taken, and nothing where backward gets what was made of scaled
    losses.
    """
    import weakref

    steps, one = steps_of(seen), Optimizer()
    for combines in (False, True):
        loss = torch.tensor(2.0)
        scaled = loss * 1024
        steps.loss_scaled(loss, weakref.ref(scaled))
        steps.backward_begins(scaled + 1 if combines else scaled)
        steps.backward_ends()
        step(steps, one)
    first, second = read_samples(seen.ring)
    assert first.loss == 2.0
    assert second.loss is None


def test_compiling_is_a_phase_of_its_own(seen: Seen) -> None:
    """While torch compiles, also later, the process is in the phase of a first step, and then
    back.
    """
    steps, one = steps_of(seen), Optimizer()
    backward(steps)
    step(steps, one)
    steps.wait_ends(ProcessPhase.EVALUATION)
    steps.phases.compile_begins()
    assert seen.board.phase is ProcessPhase.FIRST_STEP
    steps.phases.compile_ends()
    assert seen.board.phase is ProcessPhase.EVALUATION


def test_a_late_value_completes_its_sample(seen: Seen) -> None:
    """A loss that arrives after its step is put into the sample of that step, in order, without
    waiting.
    """

    class Late(PendingValue):
        here = False

        def __init__(self, value: float) -> None:
            super().__init__(torch.tensor([value]), None, ctypes.c_float)

        def has_arrived(self) -> bool:
            return self.here

    late = [Late(float(number)) for number in range(3)]
    steps, one = steps_of(seen), Optimizer()
    for each in late:
        backward(steps)
        steps._step.loss = each
        step(steps, one)
    assert all(each.loss is None for each in read_samples(seen.ring))
    late[0].here = late[2].here = True
    steps.finish()
    assert [str(each.loss) for each in read_samples(seen.ring)] == ["0.0", "None", "None"]
    late[1].here = True
    backward(steps, 9.0)
    step(steps, one)
    assert [each.loss for each in read_samples(seen.ring)] == [0.0, 1.0, 2.0, 9.0]


def test_what_fails_in_a_hook_is_noted(tmp_path: Path) -> None:
    """An error of ours goes to the observer, never into the script."""
    seen = Seen(tmp_path)
    steps = steps_of(seen)
    seen.board.close()
    steps.wait_begins()
    assert len(seen.failures) == 1


def test_samples_that_cannot_be_written_are_given_up(tmp_path: Path) -> None:
    """On a full disk steps are counted without samples, and that is noted once."""
    seen = Seen(tmp_path)
    steps, one = steps_of(seen), Optimizer()

    def fails() -> SampleRing:
        raise OSError(28, "No space left on device")

    seen.open_samples = fails  # type: ignore[method-assign]
    for _ in range(3):
        backward(steps)
        step(steps, one)
    assert [type(error) for error in seen.failures] == [OSError]
    assert seen.board.step == 3


# --- files
# ------------------------------------------------------------------------


def test_amending_a_sample_that_is_gone(tmp_path: Path) -> None:
    """A sample whose slot belongs to a newer one by now is left alone."""
    ring = SampleRing(tmp_path / "ring")
    first = ring.write(1, 1, None, None, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    for number in range(2, 32_770):
        ring.write(number, 1, 0.25, 0.5, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    ring.amend(first, loss=7.0, grad_norm=8.0)
    newest = ring.write(5, 1, None, None, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    ring.amend(newest, grad_norm=8.0)
    samples = read_samples(tmp_path / "ring")
    assert {each.loss for each in samples[:-1]} == {0.25}
    assert samples[-1].grad_norm == 8.0
    assert samples[-1].loss is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"7",
        b'"text"',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"pid": 1}',
        b'{"pid": "1", "ticks": 2, "ppid": 3, "argv": []}',
        b'{"pid": 1, "ticks": 2, "ppid": 3, "argv": [1]}',
        b'{"pid": 1, "ticks": 2, "ppid": 3, "argv": [], "role": "king"}',
        b'{"pid": 1, "ticks": 2, "ppid": 3, "argv": [], "started": NaN}',
        b'{"pid": -1, "ticks": 2, "ppid": 3, "argv": []}',
    ],
)
def test_a_damaged_process_is_passed_over(tmp_path: Path, damage: bytes) -> None:
    """What a script has written over its own description does not reach those who read it."""
    whole = ProcessInfo(
        pid=1, ticks=2, ppid=3, argv=["python"], role="trainer", rank=0, started=4.0
    )
    write_process(tmp_path, whole)
    folder = tmp_path / PROCESSES_FOLDER / "9-9"
    folder.mkdir()
    (folder / "process.json").write_bytes(damage)
    assert [info for _, info in read_processes(tmp_path)] == [whole]


@pytest.mark.parametrize(
    ("line", "launches"),
    [
        ("python /bin/torchrun --nproc 2 train.py", True),
        ("python -u -m torch.distributed.run train.py", True),
        ("python -m accelerate.commands.launch train.py", True),
        ("python /bin/accelerate launch train.py", True),
        ("python -X dev /bin/torchrun train.py", True),
        ("python3.12 -mtorch.distributed.run train.py", True),
        ("accelerate-launch train.py", True),
        ("accelerate config", False),
        ("python train.py torchrun", False),
        ("python -c torchrun", False),
        ("python -m", False),
    ],
)
def test_what_a_launcher_is(line: str, launches: bool) -> None:
    """Programs that start ranks are known by their command line."""
    assert is_launcher(line.split()) is launches


def test_a_start_beyond_floats_stops_no_reader(tmp_path: Path) -> None:
    """A start time that no float holds is a number like any other, and still has an order."""
    process = ProcessInfo(pid=1, ticks=2, ppid=3, argv=["python"], started=10**400)
    write_process(tmp_path, process)
    write_process(tmp_path, ProcessInfo(pid=2, ticks=2, ppid=3, argv=["python"], started=4.0))
    assert [info.pid for _, info in read_processes(tmp_path)] == [2, 1]
