"""`holdfast run --resume` with scripts that do not import holdfast, and real kills.

Most tests fork the supervisor and its scripts from a process that has loaded torch. A few start the
command as a user does: one is killed and continued, others are refused.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tests.forked_attempts import run_supervised, supervise_forked
from tests.prepared import run_prepared

from holdfast.recorder.reader import read_events

PROGRAMS = Path(__file__).parent / "programs" / "unchanged"
KILLED_AT_STEP = str(PROGRAMS / "killed_at_step.py")
# 160 samples in batches of 8
STEPS_PER_EPOCH = 20


@dataclass
class Outcome:
    """How a script has ended, and the lines that it has printed."""

    status: int
    lines: list[str]
    stderr: str

    @property
    def results(self) -> list[str]:
        """The lines with the digests of the final weights."""
        return [line for line in self.lines if line.startswith(("digest", "best"))]


def environment(*, save_every: int = 5, kill_at_step: int | None = None) -> dict[str, str]:
    """Return the environment of the scripts.

    The number of threads changes how sums are rounded. Saves wait for the disk, so that it does not
    depend on the disk from which step a killed script continues.
    """
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")]),
        "HOLDFAST_SAVE_INTERVAL_STEPS": str(save_every),
        "HOLDFAST_ASYNC_SAVE": "false",
        "OMP_NUM_THREADS": "1",
    }
    if kill_at_step is not None:
        variables["KILL_AT_STEP"] = str(kill_at_step)
    return variables


def run_plain(script: Path, folder: Path) -> Outcome:
    """Run a script without holdfast."""
    return outcome_of(
        run_prepared([KILLED_AT_STEP, script], cwd=folder, env=environment(), timeout=300)
    )


def run_resumable(
    script: Path,
    folder: Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    kill_at_step: int | None = None,
) -> Outcome:
    """Run a script with `--resume`, forked, and let it save every few steps."""
    words = [*options, *resumable(script, *arguments)]
    variables = environment(kill_at_step=kill_at_step)
    return outcome_of(run_supervised(words, cwd=folder, env=variables, timeout=300))


def run_command(script: Path, folder: Path, *, kill_at_step: int | None = None) -> Outcome:
    """Run a script as a user does: from the shell, and saved in the background."""
    command = [sys.executable, "-m", "holdfast", "run", *resumable(script)]
    variables = environment(kill_at_step=kill_at_step) | {"HOLDFAST_ASYNC_SAVE": "true"}
    return outcome_of(
        subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
        )
    )


def outcome_of(ended: subprocess.CompletedProcess[str]) -> Outcome:
    """Return how a process has ended, without the lines of the supervisor."""
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("---")]
    return Outcome(ended.returncode, lines, ended.stderr)


def resumable(script: Path, *arguments: str) -> list[str]:
    """Return the words after `holdfast run`: the script is resumed, but not restarted."""
    return [
        *("--quiet", "--resume", "--max-restarts", "0"),
        *("--", sys.executable, KILLED_AT_STEP, str(script), *arguments),
    ]


@cache
def undisturbed(script: str, folder: Path) -> Outcome:
    """Run a script without holdfast, once for all tests."""
    return run_plain(PROGRAMS / script, folder)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the runs without holdfast."""
    return tmp_path_factory.mktemp("plain")


def write_script(folder: Path, text: str) -> Path:
    """Write a script for one test."""
    path = folder / "train.py"
    path.write_text(text)
    return path


def guard_events(folder: Path, script: str = "killed_at_step") -> list[str]:
    """Return the kinds of the events that the guard of an unchanged script has recorded."""
    return [event.kind for event in read_events(guard_recording(folder, script))]


def guard_recording(folder: Path, script: str = "killed_at_step") -> Path:
    """Return the folder with the recording of the guard of an unchanged script."""
    return folder / "runs" / script / "guard" / "recorder" / "rank0"


def saved_steps(folder: Path, script: str = "killed_at_step") -> list[int]:
    """Return the steps of the checkpoints that are kept, in ascending order."""
    checkpoints = folder / "runs" / script / "guard" / "checkpoints"
    return sorted(int(path.name.partition("-step")[2]) for path in checkpoints.glob("[0-9]*-step*"))


@pytest.mark.slow
def test_command_that_was_killed_is_continued_by_the_same_command(
    tmp_path: Path, plain_folder: Path
) -> None:
    """`holdfast run --resume` passes on how the script ended, and the next one continues it."""
    script = PROGRAMS / "functions.py"
    plain = undisturbed("functions.py", plain_folder)

    killed = run_command(script, tmp_path, kill_at_step=47)
    resumed = run_command(script, tmp_path)

    assert killed.status == 128 + signal.SIGKILL
    assert resumed.status == 0, resumed.stderr
    assert resumed.results == plain.results
    assert set(plain.lines) == set(killed.lines) | set(resumed.lines)
    assert "steps_repeated" in guard_events(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "kill_at_step"),
    [
        ("functions.py", 78),
        ("early_stopping.py", 78),
        ("counters.py", 47),
        ("gan.py", 47),
        ("trainer_class.py", 47),
    ],
)
def test_killed_script_continues_exactly(
    script: str, kill_at_step: int, tmp_path: Path, plain_folder: Path
) -> None:
    """A script that is killed within an epoch continues there, with the results of an undisturbed one."""
    plain = undisturbed(script, plain_folder)

    killed = run_resumable(PROGRAMS / script, tmp_path, kill_at_step=kill_at_step)
    assert "save_postponed" not in guard_events(tmp_path)
    resumed = run_resumable(PROGRAMS / script, tmp_path)

    assert killed.status == 128 + signal.SIGKILL
    assert resumed.status == 0, resumed.stderr
    assert resumed.results == plain.results
    assert set(plain.lines) == set(killed.lines) | set(resumed.lines)
    assert "steps_repeated" in guard_events(tmp_path)


@pytest.mark.slow
def test_best_checkpoint_of_the_script_is_not_overwritten(
    tmp_path: Path, plain_folder: Path
) -> None:
    """Finished epochs are not run again, so the script's own files stay as they are."""
    import torch

    script = PROGRAMS / "early_stopping.py"
    undisturbed("early_stopping.py", plain_folder)
    run_resumable(script, tmp_path, kill_at_step=154)
    before = (tmp_path / "best.pt").stat().st_mtime_ns
    # The second attempt ends before its first epoch does, so no new weights can be the best ones.
    rest_of_epoch = STEPS_PER_EPOCH - saved_steps(tmp_path)[-1] % STEPS_PER_EPOCH

    run_resumable(script, tmp_path, kill_at_step=rest_of_epoch)

    assert (tmp_path / "best.pt").stat().st_mtime_ns == before
    run_resumable(script, tmp_path)
    best = torch.load(tmp_path / "best.pt")
    expected = torch.load(plain_folder / "best.pt")
    assert all(torch.equal(best[name], expected[name]) for name in expected)


HEAD = """
import itertools
import torch
from digits import dataset, digest, network
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(dataset(), batch_size=8, shuffle=True)

def train_on(inputs, labels):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
"""
REFUSED = {
    "next with a range of steps": """
batches = iter(loader)
for step in range(50):
    try:
        inputs, labels = next(batches)
    except StopIteration:
        batches = iter(loader)
        inputs, labels = next(batches)
    train_on(inputs, labels)
""",
    "two loaders in one loop": """
for (inputs, labels), _ in zip(loader, DataLoader(dataset(), batch_size=8)):
    train_on(inputs, labels)
""",
    "no loader": """
data = dataset()
for step in range(50):
    train_on(*data[torch.randint(len(data), (8,))])
""",
    "a tensor that belongs to no module": """
image = torch.randn(1, 8, requires_grad=True)
optimizer = torch.optim.SGD([image], lr=0.1)
for inputs, labels in loader:
    optimizer.zero_grad()
    model(image.expand(8, 8)).square().mean().backward()
    optimizer.step()
""",
    "a closure": """
optimizer = torch.optim.LBFGS(model.parameters())
for inputs, labels in loader:
    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "part of a generator without an end": """
def forever():
    while True:
        for batch in loader:
            yield batch

for inputs, labels in itertools.islice(forever(), 80):
    train_on(inputs, labels)
""",
    "batches in any order": """
loader = DataLoader(dataset(), batch_size=8, num_workers=2, in_order=False)
for inputs, labels in loader:
    train_on(inputs, labels)
""",
    "an iterator that is kept": """
examples = iter(DataLoader(dataset(), batch_size=4))
for inputs, labels in loader:
    train_on(inputs, labels)
""",
}


VARIANTS = {
    "variables that no checkpoint can store": """
import numpy
adjacency = torch.eye(100).expand(300, 100, 100).to_sparse()
window = numpy.ones(4, numpy.complex64)
masked = numpy.ma.array([1.0, 2.0], mask=[False, True])
for epoch in range(4):
    for inputs, labels in loader:
        train_on(inputs, labels)
""",
    "the last batch is used between epochs": """
for epoch in range(4):
    for inputs, labels in loader:
        pictures = torch.cat([inputs] * 300)
        arrays = pictures.numpy()
        train_on(inputs, labels)
    torch.save(pictures[:, 1:] - pictures[:, :-1], f"{epoch}.pt")
    print("digest of the last batch", epoch, pictures.sum().item(), arrays.sum(1).shape)
""",
    "part of each epoch by islice": """
for epoch in range(4):
    for inputs, labels in itertools.islice(loader, 15):
        train_on(inputs, labels)
""",
    "a new loader in each epoch": """
for epoch in range(4):
    for inputs, labels in DataLoader(dataset(), batch_size=8, shuffle=True):
        train_on(inputs, labels)
    print("epoch", epoch, flush=True)
""",
    "two training loaders one after the other": """
other = DataLoader(dataset(seed=5), batch_size=8, shuffle=True)
for epoch in range(2):
    for inputs, labels in loader:
        train_on(inputs, labels)
    for inputs, labels in other:
        train_on(inputs, labels)
""",
    "validation inside an epoch": """
validation = DataLoader(dataset(64, seed=1), batch_size=32)
history = []
for epoch in range(4):
    for number, (inputs, labels) in enumerate(loader):
        train_on(inputs, labels)
        if number % 7 == 6:
            model.eval()
            with torch.no_grad():
                history.append(sum(model(x).sum().item() for x, _ in validation))
            model.train()
print("digest of history", history)
""",
    "a generator that moves batches": """
def batches(loader):
    for inputs, labels in loader:
        yield inputs.double().float(), labels

for epoch in range(4):
    for inputs, labels in batches(loader):
        train_on(inputs, labels)
""",
    "a generator without an end": """
def forever(loader):
    while True:
        yield from loader

for step, (inputs, labels) in enumerate(forever(loader)):
    train_on(inputs, labels)
    if step == 79:
        break
print("digest of steps", step)
""",
    "persistent workers": """
loader = DataLoader(
    dataset(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True
)
for epoch in range(4):
    for inputs, labels in loader:
        train_on(inputs, labels)
""",
    "an iterable dataset and a generator of its own": """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for index in range(160):
            yield dataset()[index]

noise = torch.Generator().manual_seed(7)
for epoch in range(4):
    for inputs, labels in DataLoader(Stream(), batch_size=8):
        train_on(inputs + 0.1 * torch.randn(inputs.shape, generator=noise), labels)
""",
    "an averaged model and a gradient scaler": """
average = torch.optim.swa_utils.AveragedModel(model)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
for epoch in range(4):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
print("digest of the average", digest(average), scaler.get_scale())
""",
    "a child process that iterates a loader": """
import subprocess, sys
for epoch in range(4):
    for inputs, labels in loader:
        train_on(inputs, labels)
    if epoch == 1:  # before the kill, and once more before the resumed loop
        subprocess.run([sys.executable, "-c", "from torch.utils.data import DataLoader as L; list(L([1, 2]))"], check=True)
""",
    "transforms that are modules, in workers": """
class Transformed(torch.utils.data.Dataset):
    transform = torch.nn.Dropout(0.2)

    def __len__(self):
        return 160

    def __getitem__(self, index):
        inputs, label = dataset()[index]
        return self.transform(inputs), label

loader = DataLoader(Transformed(), batch_size=8, shuffle=True, num_workers=2)
validation = DataLoader(Transformed(), batch_size=32, num_workers=2)
for epoch in range(4):
    for inputs, labels in loader:
        train_on(inputs, labels)
    for inputs, labels in validation:
        total = inputs.sum().item()
    print("digest of the last validation", total)
""",
    "variables of functions and classes, and a model that is copied in the loop": """
import collections, copy
from typing import NamedTuple

class Best(NamedTuple):
    step: int = -1
    loss: float = 9e9

class Totals:
    mean = torch.zeros(())

def remember(value, seen=[]):
    seen.append(value)
    remember.calls += 1
    return sum(seen[-9:])

remember.calls = 0

def train(epoch, best, best_model):
    windows = collections.defaultdict(lambda: collections.deque(maxlen=5))
    for number, (inputs, labels) in enumerate(loader):
        train_on(inputs, labels)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels).item()
        windows["loss"].append(loss)
        Totals.mean = 0.9 * Totals.mean + 0.1 * loss
        if loss < best.loss and epoch < 2:
            best = Best(number, loss)
            best_model = copy.deepcopy(model)
        last = remember(loss)
    print("digest of epoch", epoch, number, inputs.sum().item(), list(windows["loss"]))
    return best, best_model, last

best, best_model = Best(), model
for epoch in range(4):
    best, best_model, last = train(epoch, best, best_model)
print("digest of variables", best, digest(best_model), last, remember.calls, Totals.mean.item())
""",
    "another model and optimizer for each fold": """
results = []
for fold in range(3):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = torch.utils.data.Subset(dataset(), torch.randperm(160)[:120].tolist())
    for epoch in range(2):
        for inputs, labels in DataLoader(chosen, batch_size=8, shuffle=True):
            train_on(inputs, labels)
    results.append(digest(model))
print("digest of folds", results)
""",
    "random labels between epochs": """
data = dataset().tensors
for epoch in range(4):
    data[1][torch.randperm(160)[:20]] = 0
    for inputs, labels in DataLoader(
        torch.utils.data.TensorDataset(*data), batch_size=8, shuffle=True
    ):
        train_on(inputs, labels)
print("digest of labels", data[1].sum().item())
""",
    "a dataset that the loop changes": """
class Pool(torch.utils.data.Dataset):
    def __init__(self):
        self.samples = list(dataset())
        self.active = list(range(len(self.samples)))
        self.losses = torch.zeros(len(self.samples))
    def __len__(self):
        return len(self.active)
    def __getitem__(self, number):
        index = self.active[number]
        return index, *self.samples[index]
pool = DataLoader(Pool(), batch_size=8, shuffle=True)
for epoch in range(4):
    for indices, inputs, labels in pool:
        pool.dataset.losses[indices] = model(inputs).logsumexp(1).detach()
        train_on(inputs, labels)
    pool.dataset.active = pool.dataset.losses.argsort()[:128].tolist()
""",
    "an example batch before training": """
example, _ = next(iter(loader))
for epoch in range(4):
    for inputs, labels in loader:
        train_on(inputs, labels)
        print("digest of the example", example.sum().item())
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kill_at_step"),
    [
        *((form, 54) for form in VARIANTS),
        # Resumes from the end of the second epoch.
        ("persistent workers", 43),
        # The repeated steps are in the same epoch, which does not read the changes.
        ("a dataset that the loop changes", 14),
    ],
)
def test_forms_of_loops_continue_exactly(form: str, kill_at_step: int, tmp_path: Path) -> None:
    """Loops of these forms have the same results whether or not they were killed."""
    script = write_script(tmp_path, HEAD + VARIANTS[form] + "\nprint('digest', digest(model))\n")
    plain = run_plain(script, tmp_path)

    killed = run_resumable(script, tmp_path, kill_at_step=kill_at_step)
    resumed = run_resumable(script, tmp_path)

    assert killed.status == 128 + signal.SIGKILL, killed.stderr
    assert resumed.status == 0, resumed.stderr
    assert resumed.results[-1] == plain.results[-1]
    assert set(plain.results) <= set(killed.lines) | set(resumed.lines)
    assert "steps_repeated" in guard_events(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("reason", REFUSED)
def test_script_that_cannot_be_resumed_is_refused(reason: str, tmp_path: Path) -> None:
    """A script that could not be resumed exactly ends at its first step with exit code 2."""
    script = write_script(tmp_path, HEAD + REFUSED[reason] + "\nprint('trained')\n")

    refused = run_resumable(script, tmp_path)

    assert refused.status == 2, refused.stderr
    assert "[H738]" in refused.stderr or "[H107]" in refused.stderr
    assert refused.lines == []


@pytest.mark.slow
def test_command_ends_with_2_if_its_script_is_refused(tmp_path: Path) -> None:
    """The exit code of a refused script is that of `holdfast run --resume`."""
    script = write_script(tmp_path, HEAD + REFUSED["no loader"] + "\nprint('trained')\n")

    refused = run_command(script, tmp_path)

    assert refused.status == 2, refused.stderr
    assert "[H738]" in refused.stderr
    assert refused.lines == []


@pytest.mark.slow
def test_verdict_on_a_refusal_names_the_line_of_the_script(tmp_path: Path) -> None:
    """The place is that of the step in the script, not one in holdfast."""
    script = write_script(tmp_path, HEAD + REFUSED["no loader"] + "\nprint('trained')\n")
    run_command(script, tmp_path)
    (run,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]

    command = [sys.executable, "-m", "holdfast", "explain", "--json", str(run)]
    explained = subprocess.run(command, capture_output=True, text=True, check=False)

    verdict = json.loads(explained.stdout)
    assert verdict["cause"] == "H738"
    assert verdict["where"].startswith(f"{script}:")


@pytest.mark.slow
def test_hidden_state_is_found_by_the_repeated_steps(tmp_path: Path) -> None:
    """A learning rate that follows something that is not saved ends the resume with H739."""
    script = write_script(
        tmp_path,
        HEAD
        + """
numbers = itertools.count()
for epoch in range(4):
    for inputs, labels in loader:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + next(numbers))
        train_on(inputs, labels)
torch.save(model.state_dict(), "final.pt")
""",
    )
    run_resumable(script, tmp_path, kill_at_step=34)

    resumed = run_resumable(script, tmp_path)

    assert resumed.status == 2
    assert "[H739]" in resumed.stderr
    assert not (tmp_path / "final.pt").exists()


@pytest.mark.slow
def test_floats_and_strings_that_differ_are_named(tmp_path: Path) -> None:
    """They may be times, so the script continues; equal ones are not named."""
    script = write_script(
        tmp_path,
        HEAD
        + """
import os, time
for epoch in range(4):
    started_at = str(time.time_ns())
    for inputs, labels in loader:
        process = float(os.getpid())
        minutes, epoch_secs = divmod(os.getpid(), 60)
        loss_value = float(labels.sum())
        undefined = float("nan")
        train_on(inputs, labels)
""",
    )
    run_resumable(script, tmp_path, kill_at_step=34)

    resumed = run_resumable(script, tmp_path)

    assert resumed.status == 0, resumed.stderr
    events = read_events(guard_recording(tmp_path))
    (event,) = [event for event in events if event.kind == "variables_changed"]
    assert set(event.data["names"]) <= {"epoch_secs", "minutes", "process"}
    assert "process" in event.data["names"]


@pytest.mark.slow
def test_script_whose_state_cannot_be_restored_is_not_trained(tmp_path: Path) -> None:
    """An error while variables are restored ends the resume, because its state is incomplete."""
    script = write_script(
        tmp_path,
        HEAD
        + """
class Weight(torch.nn.Module):
    def load_state_dict(self, state):
        raise RuntimeError("broken")
weight = Weight()
weight.register_buffer("value", torch.zeros(1))
for epoch in range(4):
    for inputs, labels in loader:
        train_on(inputs, labels)
torch.save(model.state_dict(), "final.pt")
""",
    )
    run_resumable(script, tmp_path, kill_at_step=34)

    resumed = run_resumable(script, tmp_path)

    assert resumed.status == 2
    assert "[H739]" in resumed.stderr
    assert not (tmp_path / "final.pt").exists()


@pytest.mark.slow
def test_optimizer_that_is_created_later_ends_the_saving(tmp_path: Path) -> None:
    """From its first step on, nothing is saved any more, and an event says so."""
    script = write_script(
        tmp_path,
        HEAD
        + """
for epoch in range(3):
    if epoch == 1:
        optimizer = torch.optim.AdamW(model.parameters())
    for inputs, labels in loader:
        train_on(inputs, labels)
""",
    )

    done = run_resumable(script, tmp_path)

    assert done.status == 0, done.stderr
    assert "resume_may_differ" in guard_events(tmp_path)
    assert 0 < saved_steps(tmp_path)[-1] <= STEPS_PER_EPOCH


@pytest.mark.slow
def test_script_without_an_optimizer_is_reported(tmp_path: Path) -> None:
    """The summary says that the script was not saved."""
    script = write_script(
        tmp_path,
        HEAD
        + """
weight = model[0].weight
for inputs, labels in loader:
    model(inputs).square().mean().backward()
    weight.data.add_(weight.grad, alpha=-0.1)
""",
    )

    done = run_resumable(script, tmp_path, options=("--json",))

    assert json.loads(done.lines[-1])["saved"] is False


@pytest.mark.slow
def test_script_that_loads_its_own_checkpoint_is_refused(tmp_path: Path) -> None:
    """A script that skips its first epochs by itself is not made to skip them twice."""
    script = write_script(
        tmp_path,
        HEAD
        + """
import os
start = 0
if os.path.exists("own.pt"):
    start = torch.load("own.pt")["epoch"]
for epoch in range(start, 4):
    for inputs, labels in loader:
        train_on(inputs, labels)
    torch.save({"epoch": epoch + 1}, "own.pt")
""",
    )
    run_resumable(script, tmp_path, kill_at_step=47)

    resumed = run_resumable(script, tmp_path)

    assert resumed.status == 2
    assert "[H739]" in resumed.stderr


@pytest.mark.slow
def test_stopped_script_saves_and_continues(tmp_path: Path, plain_folder: Path) -> None:
    """After SIGTERM, the script saves at once and stops a few steps later, for the proof."""
    script = PROGRAMS / "functions.py"
    plain = undisturbed("functions.py", plain_folder)
    printed = []
    with supervise_forked(
        resumable(script),
        cwd=tmp_path,
        env=environment(save_every=1000),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if line.startswith("epoch 2 batch 5"):
                process.send_signal(signal.SIGTERM)
                break
        printed += process.stdout.readlines()

    resumed = run_resumable(script, tmp_path)

    assert process.returncode == 0
    assert not any(line.startswith("digest") for line in printed)
    assert resumed.status == 0, resumed.stderr
    assert resumed.results == plain.results
    assert "steps_repeated" in guard_events(tmp_path)


@pytest.mark.slow
def test_script_is_stopped_from_outside(tmp_path: Path) -> None:
    """`holdfast stop` lets the script save, and the same command continues it."""
    script = write_script(
        tmp_path,
        HEAD
        + """
import os, time
for epoch in range(4):
    for inputs, labels in loader:
        train_on(inputs, labels)
        time.sleep(float(os.environ.get("PAUSE", "0")))
        print("step", flush=True)
print("digest", digest(model))
""",
    )
    plain = run_plain(script, tmp_path)
    with supervise_forked(
        resumable(script),
        cwd=tmp_path,
        env=environment(save_every=1000) | {"PAUSE": "0.5"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(12):
            process.stdout.readline()
        guard = tmp_path / "runs" / "killed_at_step" / "guard"
        stopped = subprocess.run([sys.executable, "-m", "holdfast", "stop", str(guard)])
        process.stdout.read()

    resumed = run_resumable(script, tmp_path)

    assert (stopped.returncode, process.returncode, resumed.status) == (0, 0, 0), resumed.stderr
    assert resumed.results == plain.results
    kinds = guard_events(tmp_path)
    assert "steps_repeated" in kinds
    assert "resume_may_differ" not in kinds


@pytest.mark.slow
def test_complete_run_is_not_started_again(tmp_path: Path) -> None:
    """A finished run was saved and ends at once with 0; another command in its directory gets 2."""
    script = write_script(tmp_path, HEAD + "\nfor batch in loader:\n    train_on(*batch)\n")
    first = run_resumable(script, tmp_path, options=("--json",))

    again = run_resumable(script, tmp_path)
    other = run_resumable(script, tmp_path, "--epochs", "3")

    assert (first.status, again.status) == (0, 0)
    assert json.loads(first.lines[-1])["saved"] is True
    processes = tmp_path / "runs" / "killed_at_step" / "processes"
    assert len(list(processes.iterdir())) == 1
    assert other.status == 2
    assert "[H737]" in other.stderr
