"""Scripts that train, observed and not.

The same losses bit by bit, and a record of what they did, even if killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.prepared import FRAMEWORKS, Prepared, run_prepared

from holdfast.core.events.event import Event
from holdfast.recorder.progress import ProcessPhase, Standing, StepSample, read_board, read_samples
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import BOARD_FILE, SAMPLES_FILE, ProcessInfo, read_processes
from holdfast.supervise.launch.commands import make_observed_environment

PROGRAM = Path(__file__).parent / "programs" / "observed_train.py"
GUARDED = Path(__file__).parent / "programs" / "train.py"
FSDP2 = Path(__file__).parent / "programs" / "observed_fsdp2.py"
PEERS = Path(__file__).parent / "programs" / "observed_peers.py"
_SECONDS = 300.0
Train = Callable[..., "Ended"]


class Ended:
    """What a script printed and left; `run` is its run directory, None if it was not observed."""

    def __init__(self, output: str, status: int, run: Path | None) -> None:
        self.output = output
        self.status = status
        self.run = run

    def processes(self, role: str = "trainer") -> list[tuple[Path, ProcessInfo]]:
        assert self.run is not None
        assert not list(self.run.glob("processes/failed-*")), next(
            self.run.glob("processes/failed-*")
        ).read_text()
        return [(folder, info) for folder, info in read_processes(self.run) if info.role == role]

    def samples(self) -> list[StepSample]:
        ((folder, _),) = self.processes()
        return read_samples(folder / SAMPLES_FILE)

    def standing(self) -> Standing:
        ((folder, _),) = self.processes()
        found = read_board(folder / BOARD_FILE)
        assert found is not None
        return found

    def events(self) -> list[Event]:
        ((folder, _),) = self.processes()
        return read_events(folder)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Return a function that runs the program to its end."""

    def run(
        *arguments: str, observed: bool = True, program: Path = PROGRAM, anew: bool = False
    ) -> Ended:
        place = tmp_path / ("observed" if observed else "plain")
        place.mkdir()
        environment = {
            **(make_observed_environment(os.environ, place, 0) if observed else os.environ),
            "OMP_NUM_THREADS": "1",
        }
        given: dict[str, Any] = {"cwd": place, "env": environment, "timeout": _SECONDS}
        # Where it is observed, a framework is imported after the observer has come.
        loaded = {"loaded": FRAMEWORKS} if program == PEERS and not observed else {}
        if observed and anew:  # before torch is imported
            command = [sys.executable, str(program), *arguments]
            ended = subprocess.run(command, **given, capture_output=True, text=True, check=False)
        else:
            ended = run_prepared([program, *arguments], **given, **loaded)
        return Ended(ended.stdout + ended.stderr, ended.returncode, place if observed else None)

    return run


def _without_times(output: str) -> str:
    return re.sub(r"W\d+ [\d:.]+ \d+", "", output)  # of torch's log


def printed(output: str, column: int = 0) -> list[float]:
    return [float.fromhex(line.split()[column]) for line in output.splitlines()]


def test_a_plain_loop_is_recorded_step_by_step(train: Train) -> None:
    """Loss, norm and learning rate of each step are those of the script, and its phases end
    where it ended.
    """
    ended = train("plain", "3", anew=True)
    samples = ended.samples()
    assert [sample.step for sample in samples] == [1, 2, 3]
    assert [sample.loss for sample in samples] == printed(ended.output)
    assert [sample.grad_norm for sample in samples] == printed(ended.output, 1)
    assert [sample.learning_rate for sample in samples] == [0.01, 0.01, 0.005]
    assert all(sample.seconds > sample.wait_seconds > 0 for sample in samples)
    assert samples[0].host_bytes > 2**20
    standing = ended.standing()
    assert standing.phase is ProcessPhase.ENDING
    assert standing.step == 3
    assert standing.micro_step == 3
    imported, exiting = ended.events()
    ((_, info),) = ended.processes()
    assert imported.data == {"version": info.torch}
    assert exiting.data == {"how": "returned", "status": None, "said": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "last_step", "micro_steps"),
    [
        ("gan", 12, [1] * 12),
        # Its optimizer begins with the counters of an earlier run.
        ("resumed", 52, [1] * 12),
        ("together", 6, [1] * 6),
        ("checkpointed", 6, [1] * 6),
    ],
)
def test_losses_and_steps_are_those_of_the_script(
    train: Train, shape: str, last_step: int, micro_steps: list[int]
) -> None:
    """Every loss is the same bit by bit, and each step of an optimizer is one sample."""
    observed = _train_twice(train, shape)

    assert observed.standing().step == last_step
    assert [sample.micro_steps for sample in observed.samples()] == micro_steps


@pytest.mark.slow
def test_an_accumulated_step_has_the_sum_of_its_losses(train: Train) -> None:
    """The gradients of such a step are those of the sum of its four losses."""
    observed = _train_twice(train, "accumulation")

    losses = printed(observed.output)
    sums = [sum(losses[first : first + 4]) for first in range(0, 24, 4)]
    assert [sample.micro_steps for sample in observed.samples()] == [4] * 6
    assert [sample.loss for sample in observed.samples()] == sums


@pytest.mark.slow
def test_a_loop_without_an_optimizer_is_recorded(train: Train) -> None:
    """Its steps are found by the calls of backward, with the norms of its gradients."""
    observed = _train_twice(train, "no_optimizer")

    assert observed.standing().step == 6
    assert [sample.micro_steps for sample in observed.samples()] == [1] * 6
    assert [sample.grad_norm for sample in observed.samples()] == printed(observed.output, 1)


@pytest.mark.slow
def test_a_closure_that_is_called_several_times_makes_one_step(train: Train) -> None:
    """The optimizer calls it as often as it likes."""
    assert _train_twice(train, "closure").standing().step == 6


@pytest.mark.slow
def test_a_compiled_step_is_not_counted_but_its_backward_is(train: Train) -> None:
    """Torch does not call the hooks of an optimizer that it traces."""
    observed = _train_twice(train, "compiled", anew=True)

    assert observed.standing().step == 0
    assert observed.standing().micro_step == 6


@pytest.mark.slow
def test_workers_of_a_loader_write_nothing_of_their_trainer(train: Train) -> None:
    """They are known as loader workers, and make no steps of their own."""
    observed = _train_twice(train, "plain", workers=2)

    trainers = {info.pid for _, info in observed.processes()}
    workers = observed.processes("loader worker")
    assert len(workers) >= 2
    assert {info.ppid for _, info in workers} <= trainers
    for folder, info in workers:
        board = read_board(folder / BOARD_FILE)
        assert board is not None
        assert board.pid == info.pid
        assert board.step == 0
        assert not (folder / SAMPLES_FILE).exists()


def _train_twice(train: Train, shape: str, *, workers: int = 0, anew: bool = False) -> Ended:
    """Run a loop plain and observed, check that both print the same, and return the second."""
    plain = train(shape, "6", str(workers), observed=False)
    observed = train(shape, "6", str(workers), anew=anew)
    assert plain.status == 0, plain.output
    assert observed.status == 0, observed.output
    assert _without_times(observed.output) == _without_times(plain.output)
    return observed


@pytest.mark.slow
def test_two_ranks_under_torchrun_with_fsdp2(tmp_path: Path) -> None:
    """Launcher and ranks are known; losses and norms are the script's.

    To save an optimizer's state is no step.
    """
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(FSDP2),
        ],
        env={**make_observed_environment(os.environ, tmp_path, 0), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    trainers = Ended(ended.stdout, 0, tmp_path).processes()
    ((_, launcher),) = Ended(ended.stdout, 0, tmp_path).processes("launcher")
    assert sorted((info.rank, info.local_rank, info.world_size) for _, info in trainers) == [
        (0, 0, 2),
        (1, 1, 2),
    ]
    assert {info.ppid for _, info in trainers} == {launcher.pid}
    for folder, _ in trainers:
        samples = read_samples(folder / SAMPLES_FILE)
        assert [(sample.step, sample.micro_steps) for sample in samples] == [(1, 1), (2, 1), (3, 1)]
        assert [sample.grad_norm for sample in samples] == printed(ended.stdout, 1)
    own = [
        [sample.loss for sample in read_samples(folder / SAMPLES_FILE)] for folder, _ in trainers
    ]
    assert printed(ended.stdout) in own


@pytest.mark.slow
def test_an_exception_of_a_worker_comes_out_of_the_trainer(train: Train) -> None:
    """What a worker met is recorded with the words that torch gives it, and the phase is that of
    waiting for data.
    """
    ended = train("bad_sample", "20", "1")
    assert ended.status == 1
    (exception,) = [event for event in ended.events() if event.kind == "exception"]
    assert exception.data["type"] == "KeyError"
    assert "the 50th sample is missing" in exception.data["message"]
    assert exception.data["fatal"] is True
    assert not any("holdfast/supervise" in frame[0] for frame in exception.data["frames"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_training_leaves_what_it_recorded(tmp_path: Path, number: signal.Signals) -> None:
    """After a kill at any moment the board and the samples are there, at most one step apart."""
    environment = make_observed_environment(os.environ, tmp_path, 0)
    given = {"env": environment, "cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    with Prepared([PROGRAM, "plain", 1_000_000], **given) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(30)]
        process.send_signal(number)
        lines += process.stdout.read().splitlines()
    ended = Ended("", process.returncode, tmp_path)
    samples, standing = ended.samples(), ended.standing()
    assert standing.step - samples[-1].step in (0, 1)
    assert len(samples) >= 20
    assert [sample.loss for sample in samples][:4] == printed("".join(lines[:4]))
    assert standing.phase is not ProcessPhase.ENDING


@pytest.mark.slow
def test_a_guarded_training(train: Train, tmp_path: Path) -> None:
    """With a guard and our own loader the outcome is the same to the last digit, and each step
    is one sample.
    """
    digests = []
    for observed in (False, True):
        trace = tmp_path / f"trace-{observed}"
        request = {
            "run_dir": str(tmp_path / f"run-{observed}"),
            "trace": str(trace),
            "workers": 2,
            "epochs": 2,
        }
        ended = train(json.dumps(request), observed=observed, program=GUARDED)
        assert ended.status == 0, ended.output
        digests.append(json.loads(trace.read_text().splitlines()[-1])["digest"])
    assert digests[0] == digests[1]
    (folder, _), *_ = ended.processes()  # a rehearsal in a fork may be another
    samples = read_samples(folder / SAMPLES_FILE)
    assert [sample.step for sample in samples] == list(range(1, 17))
    assert all(sample.wait_seconds > 0 for sample in samples)


DESCRIBES_WRAPPED_FUNCTIONS = """
import inspect
import pickle

import torch
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

WRAPPED = (
    torch.autograd.backward,
    torch.save,
    torch.nn.utils.clip_grad_norm_,
    torch.nn.Module.eval,
    torch.amp.GradScaler.scale,
    _BaseDataLoaderIter.__next__,
    DataLoader.__iter__,
)
for function in WRAPPED:
    print(function.__module__, function.__qualname__, inspect.signature(function))
    print(len(inspect.getdoc(function) or ""))
    print(pickle.dumps(function))
    print(inspect.getsourcelines(function)[1])
print(torch.save is torch.serialization.save)
print(torch.nn.utils.clip_grad.clip_grad_norm_ is torch.nn.utils.clip_grad_norm_)
print(torch.manual_seed(0).get_state().sum())
print(torch.is_grad_enabled())
print(torch.get_num_threads())
print(len(torch.__dict__))
"""


@pytest.mark.slow
def test_wrapped_functions_are_what_they_were(tmp_path: Path) -> None:
    """Names, signatures, pickling and documentation of what is wrapped are those of torch."""
    script = tmp_path / "script.py"
    script.write_text(DESCRIBES_WRAPPED_FUNCTIONS)
    run = tmp_path / "run"
    run.mkdir()
    outputs = [
        subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for environment in (dict(os.environ), make_observed_environment(os.environ, run, 0))
    ]
    assert outputs[0].stdout == outputs[1].stdout
    assert Ended("", 0, run).processes("other")


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["accelerate", "transformers", "pytorch_lightning"])
def test_frameworks(train: Train, peer: str) -> None:
    """Steps of a loop that a framework runs are seen as its optimizer makes them, with the same
    losses.
    """
    pytest.importorskip(peer)
    plain = train(peer, observed=False, program=PEERS)
    observed = train(peer, program=PEERS)
    assert (plain.status, observed.status) == (0, 0), observed.output
    lines = [
        next(line for line in ended.output.splitlines() if line.startswith('{"steps"'))
        for ended in (plain, observed)
    ]
    assert lines[0] == lines[1]
    asked = json.loads(lines[0])
    assert [sample.step for sample in observed.samples()] == list(range(1, asked["steps"] + 1))
    assert {sample.micro_steps for sample in observed.samples()} == {asked["micro_steps"]}
