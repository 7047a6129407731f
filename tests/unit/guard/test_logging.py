"""Numbers of one's own: what is recorded of them, what is refused, and who may write."""

from __future__ import annotations

import errno
import gc
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import events, guarded, square_of

import holdfast
from holdfast.recorder.ring import read_ring
from holdfast.recorder.scalars import SCALARS_FILE, outlets, scalars_of, with_recording
from holdfast.supervise.observe.logged_scalars import read_lightning_log


def scalars(run):
    return scalars_of(read_ring(run / "recorder" / "rank0" / SCALARS_FILE))


def values(run):
    return {each.name: each.value for each in scalars(run)}


def in_a_child(act):
    if (pid := os.fork()) == 0:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.fixture
def guard(tmp_path):
    with guarded(tmp_path, torch.nn.Linear(2, 1)) as guard:
        yield guard


def test_each_number_has_its_step_epoch_and_split(tmp_path):
    """Over two epochs of two steps each value says where the run stood.

    After the loop too, and in the next guard.
    """
    model = torch.nn.Linear(2, 1)
    with guarded(tmp_path, model, loader=[torch.ones(1, 2)] * 2) as guard:
        assert not (tmp_path / "recorder" / "rank0" / SCALARS_FILE).exists()
        for batch in guard.batches(max_epochs=2):
            guard.step(batch, square_of(model))
            guard.log({"val/wer": 0.5}, split="validation", seen=guard.global_step)
        guard.log(accuracy=0.5)  # the loop has released the directory
        with guarded(tmp_path, model) as other:
            other.log(a=2.0)
            with pytest.raises(holdfast.RunDirectoryError, match="H301"):
                guard.log(a=3.0)
    found = scalars(tmp_path)
    assert [each.name for each in found[:2]] == ["validation/val/wer", "validation/seen"]
    assert [each[1:4] for each in found[1:8:2]] == [(1, 1, 0), (2, 2, 0), (3, 3, 1), (4, 4, 1)]
    assert [each[:4] for each in found[8:]] == [("accuracy", 0.5, 4, 2), ("a", 2.0, 0, None)]


def test_what_is_a_number(guard, tmp_path):
    """Ints, numpy's and tensors of one element of any shape and type are numbers.

    NaN and Inf are values.
    """
    given = {
        "int": 3,
        "bool": True,
        "inf": -math.inf,
        "f32": np.float32(0.5),
        "array": np.array([[2]]),
        "x" * 64: 1.0,
        "tensor": torch.tensor([0.25], requires_grad=True),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "loss": torch.tensor([True]),
        "ä" * 32: 1.0,
        "\0 ": 1.0,
    }
    guard.log(given | {"nan": math.nan}, values=7)
    found = values(tmp_path)
    assert math.isnan(found.pop("nan"))
    assert found == {
        name: float(getattr(value, "item", lambda v=value: v)()) for name, value in given.items()
    } | {"values": 7}


@pytest.mark.parametrize(
    "log", [holdfast.Guard.log, lambda _, *given, **named: holdfast.log(*given, **named)]
)
@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        ({}, {"a": "0.5"}, "'a' = '0.5'; .* real number"),
        ({}, {"a": None}, "'a' = None"),
        ({}, {"a": 1j}, "'a' = 1j"),
        ({}, {"a": 10**400}, "'a' = 1000"),
        ({}, {"a": torch.ones(3)}, "'a' = Tensor of shape \\(3,\\)"),
        ({}, {"a": np.zeros((0, 1))}, "'a' = ndarray of shape \\(0, 1\\)"),
        ({}, {"a": {"b": 1.0}}, "'a' = {'b'"),
        ({"": 1.0}, {}, "'' = 1.0; .* has 0"),
        ({"": 1.0}, {"split": "val"}, "'val/' = 1.0"),
        ({1: 1.0}, {}, "1 = 1.0"),
        ({"x" * 65: 1.0}, {}, "'x+' = 1.0; .* 1 to 64 bytes of UTF-8, .* has 65"),
        ({"ä" * 30: 1.0}, {"split": "train"}, "'train/ä+' = .* has 66"),
        (0.5, {}, "None = 0.5"),
        ({}, {"a": 1.0, "split": 3}, "'3/"),
    ],
)
def test_what_is_none_is_refused_whole(guard, tmp_path, log, given, named, said):
    """The error says what was found, the limit and what to do, and nothing of such a call is
    recorded.
    """
    guard.log(good=1.0)
    with pytest.raises(holdfast.PolicyError, match=f"log\\(\\) of {said}") as error:
        log(
            guard,
            {"before": 1.0, **given} if isinstance(given, dict) and "split" not in named else given,
            **named,
        )
    assert error.value.rule == "H117"
    assert values(tmp_path) == {"good": 1.0}


def test_a_forked_worker_writes_nothing(guard, tmp_path):
    """Neither by the guard that it has from its parent nor by the function, before and after the
    file is there.
    """
    in_a_child(lambda: (guard.log(a=1.0), holdfast.log(a=1.0)))
    assert scalars(tmp_path) == []
    guard.log(a=2.0)
    in_a_child(lambda: guard.log(a=3.0))
    guard.log(a=4.0)
    assert [each.value for each in scalars(tmp_path)] == [2.0, 4.0]


def test_the_function_logs_in_the_newest_open_guard_or_nowhere(tmp_path):
    """A guard that is closed or collected is passed over; without any the call does nothing."""
    with guarded(tmp_path / "a", torch.nn.Linear(2, 1)):
        with guarded(tmp_path / "b", torch.nn.Linear(2, 1)):
            holdfast.log(of_b=1)
        collected = guarded(tmp_path / "c", torch.nn.Linear(2, 1))
        holdfast.log(of_c=1)
        del collected
        gc.collect()
        holdfast.log(of_a=1)
    holdfast.log(of_nobody=1)
    assert [list(values(tmp_path / name)) for name in "abc"] == [["of_a"], ["of_b"], ["of_c"]]


def test_a_full_disk_is_one_event_and_training_goes_on(guard, tmp_path, monkeypatch, caplog):
    """The first number finds no room: that is recorded and logged once, and no number raises."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        guard.log(a=1.0)
    guard.log(a=2.0)
    assert [event.data for event in events(guard, "scalars_not_recorded")] == [
        {"error": "No space left on device"}
    ]
    assert caplog.text.count("No space left on device") == 1
    assert scalars(tmp_path) == []


def test_nothing_is_read_for_nobody():
    """What a logger of another library got is read only if something records it."""
    looked = []

    def read(value):
        looked.append(value)
        raise ValueError("cannot be read")

    assert not list(outlets)
    log = with_recording(lambda value: 2 * value, read, looked.append)
    assert log(3) == 6
    assert looked == []


def test_a_metric_called_step_is_the_step_only_without_one():
    """As in Lightning: with an explicit step, a metric of that name is a metric."""
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=7))
    connector = SimpleNamespace(trainer=SimpleNamespace(fit_loop=loop))
    metrics = {"loss": 1.0, "step": 3}
    assert read_lightning_log(connector, metrics, 5) == (metrics, 5)
    assert read_lightning_log(connector, metrics) == ({"loss": 1.0}, 3)
    assert read_lightning_log(connector, {"loss": 1.0}) == ({"loss": 1.0}, 7)
