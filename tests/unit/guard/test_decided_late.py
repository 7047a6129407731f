"""A step whose result is read one step later ends as it would if it were read at once.

All of these tests run on the CPU, where torch's fused optimizers have the same gate as on a GPU.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import Short, assert_same, kinds_of, tensors_of, the_event
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.guard.run.undecided import UndecidedResult

Batch = tuple[torch.Tensor, torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "AMSGrad": lambda weights: torch.optim.Adam(weights, lr=1e-2, amsgrad=True, fused=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=1e-2, fused=True),
    "momentum": lambda weights: torch.optim.SGD(
        weights, lr=1e-2, momentum=0.9, dampening=0.1, fused=True
    ),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-2, fused=True),
}


# Events that depend on the mode, or that hold a duration.
MODE_DEPENDENT_EVENTS = (
    "decided_now",
    "optimizer_not_fused",
    "loss_function_reads",
    "checkpoint_saved",
    "late_steps",
)


class Training:
    """A model with BatchNorm and dropout, its optimizer and its schedule."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)

    def loss(self, batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.model(inputs), labels)

    def guard(self, run_dir: Path, decide: str, **settings: Any) -> holdfast.Guard:
        """Return a guard that saves nothing and diagnoses nothing."""
        quiet = {"save_interval_steps": None, "diagnose": False, "nonfinite_patience": None}
        return holdfast.Guard(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            decide=decide,
            **{**quiet, **settings},
        )

    def state(self) -> list[torch.Tensor]:
        """Return the weights, buffers and moments, and the learning rate."""
        rate = torch.tensor(self.scheduler.get_last_lr())
        return [*tensors_of(self.model, self.optimizer), rate]


def batches(count: int, bad: Iterable[int] = ()) -> list[Batch]:
    """Return batches, some of which have a NaN in their inputs."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        inputs = torch.randn(8, 16, generator=generator)
        labels = torch.randint(0, 4, (8,), generator=generator)
        if index in bad:
            inputs[3, 2] = float("nan")
        made.append((inputs, labels))
    return made


def train_without_guard(training: Training, data: list[Batch]) -> None:
    """Train without a guard."""
    for batch in data:
        training.optimizer.zero_grad()
        training.loss(batch).backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        training.scheduler.step()


def assert_undecided(results: list[holdfast.StepResult], at_least: int) -> None:
    """Check that at least this many steps were decided late, so that a test is not vacuous."""
    assert sum(isinstance(result, UndecidedResult) for result in results) >= at_least


@pytest.mark.parametrize("bad", [(), (0,), (5,), (5, 6), (1, 9, 19), (19,)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_late_run_equals_a_plain_loop_without_the_bad_batches(
    tmp_path: Path, optimizer: str, bad: tuple[int, ...]
) -> None:
    """Weights, buffers, moments, learning rate and random state are equal bit for bit."""
    plain = Training(optimizer)
    torch.manual_seed(7)
    train_without_guard(plain, [batch for i, batch in enumerate(batches(20, bad)) if i not in bad])
    next_random_number = torch.rand(())

    late = Training(optimizer)
    torch.manual_seed(7)
    with late.guard(tmp_path, "late", max_grad_norm=1.0) as guard:
        results = [guard.step(batch, late.loss) for batch in batches(20, bad)]

    assert torch.equal(torch.rand(()), next_random_number)
    assert_same(late.state(), plain.state())
    assert tuple(i for i, result in enumerate(results) if result.skipped) == bad
    assert guard.global_step == 20 - len(bad)
    assert_undecided(results, at_least=18)


def test_state_is_right_before_the_result_is_read(tmp_path: Path) -> None:
    """A refused step leaves the weights, buffers and moments unchanged as soon as it returns."""
    training = Training()
    with training.guard(tmp_path, "late") as guard:
        for batch in batches(3):
            guard.step(batch, training.loss)
        guard.statistics()
        before = training.state()

        result = guard.step(batches(1, bad=[0])[0], training.loss)

        assert isinstance(result, UndecidedResult)
        assert_same(training.state(), before)
        assert guard.global_step == 4
        assert result.skipped
        assert guard.global_step == 3


@pytest.mark.parametrize(
    "read",
    [
        lambda guard, result: result.skipped,
        lambda guard, result: result.grad_norm,
        lambda guard, result: result.loss.item(),
        lambda guard, result: float(result.loss),
        lambda guard, result: f"{result.loss:.3f}",
        lambda guard, result: repr(result.loss),
        lambda guard, result: result.loss.cpu(),
        lambda guard, result: guard.statistics(),
        lambda guard, result: guard.events(),
        lambda guard, result: guard.evaluate().__enter__(),
        lambda guard, result: guard.validated(1.0),
        lambda guard, result: guard.diagnose(),
        lambda guard, result: guard.close(),
    ],
)
def test_reading_a_result_decides_the_step(
    tmp_path: Path, read: Callable[[holdfast.Guard, holdfast.StepResult], Any]
) -> None:
    """The step is skipped and recorded at once, without waiting for the next step."""
    training = Training()
    guard = training.guard(tmp_path, "late")
    good, bad = batches(2, bad=[1])
    guard.step(good, training.loss)
    result = guard.step(bad, training.loss)
    assert guard.global_step == 2

    read(guard, result)

    assert guard.global_step == 1
    assert "skip_step" in kinds_of(guard)


def test_a_loss_can_be_used_without_waiting(tmp_path: Path) -> None:
    """Sums and copies of a loss are plain tensors, and leave the step undecided."""
    training = Training()
    with training.guard(tmp_path, "late") as guard:
        good, bad = batches(2, bad=[1])
        guard.step(good, training.loss)
        result = guard.step(bad, training.loss)

        total = torch.zeros(()) + result.loss.detach()
        stacked = torch.stack([result.loss, total])

        assert guard.global_step == 2
        assert type(total) is type(stacked) is torch.Tensor
        assert guard.statistics().global_step == 1


@pytest.mark.parametrize(("decide", "late", "repeated"), [("now", 0, 0), ("late", 9, 2)])
def test_late_and_repeated_steps_are_counted(
    tmp_path: Path, decide: str, late: int, repeated: int
) -> None:
    """The first step is decided now, and of the others, the device refuses the two bad ones."""
    training = Training()
    with training.guard(tmp_path, decide) as guard:
        for batch in batches(10, bad=[4, 7]):
            guard.step(batch, training.loss)
    statistics = guard.statistics()

    assert (statistics.late_steps, statistics.repeated_late_steps) == (late, repeated)
    assert statistics.steps == 8
    events = [event.data for event in guard.events() if event.kind == "late_steps"]
    assert events == ([{"steps": late, "repeated": repeated}] if late else [])


# --- the same as at once


def train_in(
    run_dir: Path, decide: str, train: Callable[[Path, str], tuple[Any, list[torch.Tensor]]]
) -> tuple[list[Any], list[torch.Tensor]]:
    """Train with one setting of `decide`, and return the events and the final state."""
    torch.manual_seed(7)
    random.seed(7)
    guard, state = train(run_dir / decide, decide)
    events = [
        (event.kind, event.global_step, event.data)
        for event in guard.events()
        if event.kind not in MODE_DEPENDENT_EVENTS
    ]
    return events, state


def assert_same_in_both_modes(
    run_dir: Path, train: Callable[[Path, str], tuple[Any, list[torch.Tensor]]]
) -> list[str]:
    """Train in both modes, compare events and state, and return the kinds of the events."""
    now_events, now_state = train_in(run_dir, "now", train)
    late_events, late_state = train_in(run_dir, "late", train)
    assert_same(late_state, now_state)
    assert late_events == now_events
    return [kind for kind, _, _ in late_events]


def test_a_loop_with_shuffling_and_several_epochs(tmp_path: Path) -> None:
    """A bad batch at the end of an epoch does not change the order of the next one."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        inputs, labels = (torch.cat(parts) for parts in zip(*batches(6, bad=[2]), strict=True))
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
        guard = training.guard(run_dir, decide, loader=loader)
        results = [guard.step(batch, training.loss) for batch in guard.batches(max_epochs=4)]
        if decide == "late":
            assert_undecided(results, at_least=20)
        return guard, [*training.state(), torch.rand(())]

    kinds = assert_same_in_both_modes(tmp_path, train)
    assert kinds.count("skip_step") == 4


def test_max_steps_counts_only_steps_that_were_not_refused(tmp_path: Path) -> None:
    """A refused last step is replaced by another one."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide, loader=batches(8, bad=[4]))
        for batch in guard.batches(max_steps=5):
            guard.step(batch, training.loss)
        assert guard.global_step == 5
        return guard, training.state()

    assert "skip_step" in assert_same_in_both_modes(tmp_path, train)


@pytest.mark.parametrize("in_loop", [True, False], ids=["noise in the loop", "noise in the step"])
def test_noise_is_the_same_in_both_modes(tmp_path: Path, in_loop: bool) -> None:
    """If the loop and the step draw from the same generator, steps are decided now."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide)
        for inputs, labels in batches(12, bad=[6]):
            noise = torch.randn(16) if in_loop else torch.full((16,), random.random())
            guard.step((inputs + noise, labels), training.loss)
        guard.close()
        assert ("decided_now" in kinds_of(guard)) == (decide == "late" and in_loop)
        return guard, [*training.state(), torch.rand(()), torch.tensor(random.random())]

    assert_same_in_both_modes(tmp_path, train)


def test_two_networks_that_take_turns(tmp_path: Path) -> None:
    """In a GAN, each of the two steps on a batch may be refused independently."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        nets = {"generator": nn.Linear(4, 16), "critic": nn.Linear(16, 1)}
        optimizers = {
            name: torch.optim.Adam(net.parameters(), lr=1e-2, fused=True)
            for name, net in nets.items()
        }
        guard = holdfast.Guard(
            run_dir,
            model=nets,
            optimizer=optimizers,
            decide=decide,
            diagnose=False,
            save_interval_steps=None,
            loader=batches(12, bad=[5]),
        )

        def critic_loss(batch: Batch) -> torch.Tensor:
            made = nets["generator"](torch.randn(8, 4)).detach()
            return (nets["critic"](made) - nets["critic"](batch[0])).mean()

        def generator_loss(_: Batch) -> torch.Tensor:
            return -nets["critic"](nets["generator"](torch.randn(8, 4))).mean()

        for batch in guard.batches(max_epochs=2):
            guard.step(batch, critic_loss, optimizer="critic")
            guard.step(batch, generator_loss, optimizer="generator")
        state = [
            tensor for name, net in nets.items() for tensor in tensors_of(net, optimizers[name])
        ]
        return guard, [*state, torch.rand(())]

    assert assert_same_in_both_modes(tmp_path, train).count("skip_step") == 2


def poisoned(training: Training, factors: dict[int, float]) -> Callable[[Batch], torch.Tensor]:
    """Return a loss function that multiplies the losses of some batches by large factors.

    The batch's number is its first label, so a repetition of a step has the same factor.
    """

    def loss_fn(batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        number = int(labels[0])
        loss = nn.functional.cross_entropy(training.model(inputs), labels % 4)
        return loss * factors.get(number, 1.0)

    return loss_fn


def numbered(count: int) -> list[Batch]:
    """Return batches whose first label is the number of the batch."""
    made = []
    for number, (inputs, labels) in enumerate(batches(count)):
        labels[0] = number
        made.append((inputs, labels))
    return made


def test_a_norm_that_overflows_is_no_reason_to_skip(tmp_path: Path) -> None:
    """A finite gradient of 1e25 is clipped by its exact norm."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide, max_grad_norm=1.0)
        for batch in numbered(8):
            guard.step(batch, poisoned(training, {5: 1e25}))
        guard.close()
        return guard, training.state()

    assert "norm_overflowed" in assert_same_in_both_modes(tmp_path, train)


@pytest.mark.parametrize("action", ["warn", "skip", "roll_back"])
def test_spikes_and_divergence(tmp_path: Path, action: str) -> None:
    """A spike and a lasting rise of the loss lead to the same decisions."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(
            run_dir,
            decide,
            spike_action=action,
            max_rollbacks=3,
            # Snapshots depend on the time that they take, and checkpoints at fixed steps do not.
            snapshot_interval_steps=None,
            save_interval_steps=20,
            async_save=False,
        )
        factors = {150: 1e4, **dict.fromkeys(range(200, 240), 50.0)}
        for batch in numbered(260):
            guard.step(batch, poisoned(training, factors))
        guard.close()
        return guard, training.state()

    kinds = assert_same_in_both_modes(tmp_path, train)
    wanted = {"warn": "spike", "skip": "skip_step", "roll_back": "roll_back"}
    assert wanted[action] in kinds


def test_rollback_after_several_bad_steps(tmp_path: Path) -> None:
    """The patience counts refused steps, and a rollback restores the same state."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(
            run_dir, decide, nonfinite_patience=3, save_interval_steps=4, async_save=False
        )
        for batch in batches(20, bad=[9, 10, 11]):
            guard.step(batch, training.loss)
        guard.close()
        return guard, [*training.state(), torch.rand(())]

    assert "rolled_back" in assert_same_in_both_modes(tmp_path, train)


def test_samples_are_dropped(tmp_path: Path) -> None:
    """A refused step is made again without the samples that cause NaN."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide, drop_nonfinite_samples=True)
        results = [guard.step(batch, training.loss) for batch in batches(10, bad=[4, 9])]
        guard.close()
        assert [result.dropped_samples for result in results if result.dropped_samples] == [
            (3,),
            (3,),
        ]
        losses = [result.loss.item() for result in results]
        return guard, [*training.state(), torch.tensor(losses)]

    assert "samples_dropped" in assert_same_in_both_modes(tmp_path, train)


def test_out_of_memory_in_the_next_step(tmp_path: Path) -> None:
    """If a step runs out of memory, the bad step before it is decided before the retry."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        short = Short()
        guard = training.guard(run_dir, decide)

        def loss_fn(batch: Batch) -> torch.Tensor:
            short()
            return training.loss(batch)

        for number, batch in enumerate(batches(10, bad=[5])):
            if number == 6:
                # The bad step is repeated before this one is retried.
                short.times = 1
            guard.step(batch, loss_fn)
        guard.close()
        assert guard.global_step == 9
        return guard, [*training.state(), torch.rand(())]

    # The events differ: in the mode "late", the error comes before the bad step is decided.
    now_state = train_in(tmp_path, "now", train)[1]
    late_state = train_in(tmp_path, "late", train)[1]
    assert_same(late_state, now_state)


def test_loss_scaling(tmp_path: Path) -> None:
    """In fp16, the scale is lowered by the steps that overflow, and by no others."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide, precision="fp16")
        for batch in numbered(12):
            guard.step(batch, poisoned(training, {5: 1e4, 8: 1e3}))
        guard.close()
        scale = guard.statistics().loss_scale
        return guard, [*training.state(), torch.tensor(scale)]

    assert "loss_scale_lowered" in assert_same_in_both_modes(tmp_path, train)


def test_the_loss_scale_is_lowered_by_a_step_whose_repetition_is_finite(tmp_path: Path) -> None:
    """In fp16, a factor that has changed since does not leave the scale as it was."""

    def train(run_dir: Path, decide: str) -> holdfast.Guard:
        training = Training()
        guard = training.guard(run_dir, decide, precision="fp16")
        for number, batch in enumerate(batches(8)):
            factor = 1e6 if number == 5 else 1e-2
            guard.step(batch, lambda b: training.loss(b) * factor)  # noqa: B023
        guard.close()
        return guard

    now = train(tmp_path / "now", "now")
    late = train(tmp_path / "late", "late")

    event = the_event(late, "loss_scale_lowered")
    assert event.data["loss_scale"] == 2.0**15
    assert late.statistics().loss_scale == now.statistics().loss_scale
    assert event.data["loss_scale"] == the_event(now, "loss_scale_lowered").data["loss_scale"]


def test_checkpoints_hold_only_decided_steps(tmp_path: Path) -> None:
    """A run that is resumed after 4 and 9 steps ends in the same state."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        for max_steps in (4, 9, 14):
            training = Training()
            torch.manual_seed(7)
            guard = training.guard(
                run_dir,
                decide,
                loader=batches(18, bad=[3, 8]),
                save_interval_steps=2,
                # A background save that takes long would postpone the next one.
                async_save=False,
            )
            for batch in guard.batches(max_steps=max_steps):
                guard.step(batch, training.loss)
        return guard, [*training.state(), torch.rand(())]

    assert "skip_step" in assert_same_in_both_modes(tmp_path, train)


# --- the diagnosis


class DeadUnits(nn.Module):
    """A network whose ReLUs never fire, so that all gradients are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.last = nn.Linear(32, 4, bias=False)
        nn.init.constant_(self.first.bias, -100.0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).relu())  # type: ignore[no-any-return]


class FrozenPart(nn.Module):
    """A network with a layer that receives no gradient, and one that has no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.detached = nn.Linear(32, 32)
        self.forgotten = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).relu()
        with torch.no_grad():
            shift = self.detached(hidden)
        return self.last(self.forgotten(hidden) + shift)  # type: ignore[no-any-return]


def plain_network() -> nn.Module:
    """Return a network without a fault."""
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def loss_of_probabilities(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a cross entropy that is given probabilities, which is a mistake."""
    return nn.functional.cross_entropy(scores.softmax(1), labels)


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """A run with a fault, and the rule that finds it."""

    rule: str
    make_model: Callable[[], nn.Module] = plain_network
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy
    lr: float = 1e-2
    # The batches with NaN. The first 8 steps are sampled, and so are the steps after 26 and 27
    # others.
    bad: tuple[int, ...] = ()


DIAGNOSED = {
    "dead ReLUs": Diagnosed(rule="H815", make_model=DeadUnits),
    "learning rate too high": Diagnosed(rule="H825", lr=30.0),
    "a frozen part": Diagnosed(rule="H808", make_model=FrozenPart),
    "probabilities as scores": Diagnosed(rule="H836", loss=loss_of_probabilities),
    "NaN in sampled steps": Diagnosed(rule="H806", bad=(4, 6, 27)),
    "NaN in all kinds of steps": Diagnosed(
        rule="H836", loss=loss_of_probabilities, bad=(0, 5, 6, 20, 26, 59)
    ),
}


def train_diagnosed(
    run_dir: Path, decide: str, run: Diagnosed, *, reads: bool = False
) -> tuple[holdfast.Guard, list[torch.Tensor], list[Any]]:
    """Make 60 steps with the diagnosis.

    Args:
        run_dir: The run directory.
        decide: When results are read.
        run: The run.
        reads: Whether the loss function reads the result of the step before, and a validation
            follows every 10 steps.

    Returns:
        The guard, the weights and moments, and all findings.
    """
    torch.manual_seed(0)
    model = run.make_model()
    parameters = [
        parameter
        for name, parameter in model.named_parameters()
        if not name.startswith("forgotten.")
    ]
    optimizer = torch.optim.AdamW(parameters, lr=run.lr, fused=True)
    results: list[holdfast.StepResult] = []

    def loss_fn(batch: Batch) -> torch.Tensor:
        weight = 1.0
        if reads and results and results[-1].skipped:
            weight = 0.5
        return run.loss(model(batch[0]), batch[1]) * weight

    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=optimizer,
        decide=decide,
        save_interval_steps=None,
        nonfinite_patience=None,
        max_grad_norm=1.0,
    )
    for number, batch in enumerate(batches(60, run.bad), start=1):
        results.append(guard.step(batch, loss_fn))
        if decide == "late" and number == 8 and not run.bad:
            # Except for the first step, sampled steps are undecided.
            assert_undecided(results, at_least=7)
        if reads and number % 10 == 0:
            guard.validated(float(number))
    findings = guard.diagnose()
    guard.close()
    return guard, tensors_of(model, optimizer), findings


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read in the next step"])
@pytest.mark.parametrize("run", DIAGNOSED.values(), ids=DIAGNOSED)
def test_findings_are_the_same_in_both_modes(tmp_path: Path, run: Diagnosed, reads: bool) -> None:
    """Sampled steps are decided late, and findings have the same steps, texts and values."""
    diagnosed = {}

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        guard, state, findings = train_diagnosed(run_dir, decide, run, reads=reads)
        diagnosed[decide] = findings
        return guard, state

    assert_same_in_both_modes(tmp_path, train)
    assert diagnosed["late"] == diagnosed["now"]
    assert run.rule in {finding.rule for finding in diagnosed["late"]}


def test_a_refused_step_is_observed_once(tmp_path: Path) -> None:
    """What was measured in a refused step, and in the attempt after it, is measured again."""
    run = DIAGNOSED["NaN in all kinds of steps"]

    observed = {}
    for decide in ("now", "late"):
        guard, _, _ = train_diagnosed(tmp_path / decide, decide, run)
        observer = guard._engine.diagnosis._observer
        assert observer is not None
        observed[decide] = asdict(observer.observations())

    assert observed["late"] == observed["now"]
    assert observed["late"]["inputs"]["model"]["nonfinite"] == 4
    assert observed["late"]["optimizers"]["optimizer"]["steps"] == 60 - len(run.bad)


def test_two_networks_are_diagnosed_in_turns(tmp_path: Path) -> None:
    """Each optimizer's sampled steps are observed as if they were decided at once."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        nets = {"first": DeadUnits(), "second": plain_network()}
        optimizers = {
            name: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
            for name, net in nets.items()
        }
        guard = holdfast.Guard(
            run_dir,
            model=nets,
            optimizer=optimizers,
            decide=decide,
            save_interval_steps=None,
            nonfinite_patience=None,
        )
        for batch in batches(30, bad=[5, 13]):
            for name, net in nets.items():
                guard.step(
                    batch,
                    lambda b, net=net: nn.functional.cross_entropy(net(b[0]), b[1]),
                    optimizer=name,
                )
        guard.close()
        return guard, [t for name, net in nets.items() for t in tensors_of(net, optimizers[name])]

    assert "finding" in assert_same_in_both_modes(tmp_path, train)


# --- when a step cannot be repeated


def test_a_batch_that_was_changed_since_is_not_replayed(tmp_path: Path) -> None:
    """If the loop reuses its batch buffer, the origin of NaN is unknown, but training is exact."""
    bad = (5,)
    plain = Training()
    torch.manual_seed(7)
    train_without_guard(plain, [batch for i, batch in enumerate(batches(8, bad)) if i not in bad])

    late = Training()
    torch.manual_seed(7)
    inputs = torch.empty(8, 16)
    labels = torch.empty(8, dtype=torch.long)
    with late.guard(tmp_path, "late", max_grad_norm=1.0) as guard:
        for batch in batches(8, bad):
            inputs.copy_(batch[0])
            labels.copy_(batch[1])
            guard.step((inputs, labels), late.loss)

    assert_same(late.state(), plain.state())
    assert "nonfinite_not_traced" in kinds_of(guard)


def test_a_step_that_reads_a_changed_variable_stays_refused(tmp_path: Path) -> None:
    """A refused step is skipped even if its loss is finite when the step is repeated."""
    bad = (5,)
    plain = Training()
    train_without_guard(plain, [batch for i, batch in enumerate(batches(8)) if i not in bad])

    late = Training()
    with late.guard(tmp_path, "late", max_grad_norm=1.0) as guard:
        results = []
        for number, batch in enumerate(batches(8)):
            factor = float("nan") if number in bad else 1.0
            results.append(guard.step(batch, lambda b: late.loss(b) * factor))  # noqa: B023

    assert_same(late.state(), plain.state())
    assert [i for i, result in enumerate(results) if result.skipped] == [5]
    assert guard.global_step == 7


def test_a_loss_function_may_read_the_result_of_the_step_before(tmp_path: Path) -> None:
    """If that step was refused, the attempt that reads its result is repeated after it."""

    def train(run_dir: Path, decide: str) -> tuple[Any, list[torch.Tensor]]:
        training = Training()
        guard = training.guard(run_dir, decide)
        results: list[holdfast.StepResult] = []

        def loss_fn(batch: Batch) -> torch.Tensor:
            weight = 0.5 if results and results[-1].skipped else 1.0
            return training.loss(batch) * weight

        for batch in batches(10, bad=[5]):
            results.append(guard.step(batch, loss_fn))
        guard.close()
        return guard, [*training.state(), torch.rand(())]

    assert "skip_step" in assert_same_in_both_modes(tmp_path, train)


def test_an_error_names_its_step(tmp_path: Path) -> None:
    """An error that is raised while the next step runs names the step that caused it."""
    training = Training()
    good, bad, following = batches(3, bad=[1])
    with training.guard(tmp_path, "late", nonfinite_patience=1, max_rollbacks=0) as guard:
        guard.step(good, training.loss)
        result = guard.step(bad, training.loss)

        with pytest.raises(holdfast.NonFiniteError) as caught:
            guard.step(following, training.loss)

    assert "step 2" in caught.value.__notes__[0]
    assert result.skipped


# --- where it applies


def test_an_optimizer_without_a_gate_is_refused(tmp_path: Path) -> None:
    """``decide="late"`` needs a fused optimizer, and the error names the one that is not."""
    model = nn.Linear(2, 1)
    with pytest.raises(holdfast.PolicyError) as caught:
        holdfast.Guard(
            tmp_path,
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            decide="late",
        )
    assert caught.value.rule == "H105"
    assert "fused=True" in caught.value.fix


def test_the_gate_leaves_no_attribute_behind(tmp_path: Path) -> None:
    """The optimizer's ``found_inf`` is removed, or set to its earlier value, after each step."""
    training = Training()
    with training.guard(tmp_path, "late") as guard:
        for batch in batches(3):
            guard.step(batch, training.loss)
            assert not hasattr(training.optimizer, "found_inf")
        training.optimizer.found_inf = earlier = torch.zeros(())  # type: ignore[attr-defined]
        guard.step(batches(1)[0], training.loss)
        assert training.optimizer.found_inf is earlier  # type: ignore[attr-defined]


def test_state_objects_are_decided_now(tmp_path: Path) -> None:
    """Objects passed as ``state=`` cannot be gated, and one event says so."""
    training = Training()
    state = nn.Linear(1, 1)
    with training.guard(tmp_path, "late", state={"extra": state}) as guard:
        results = [guard.step(batch, training.loss) for batch in batches(4)]
    assert not any(isinstance(result, UndecidedResult) for result in results)
    assert kinds_of(guard, "decided_now") == ["decided_now"]


def test_a_loss_function_that_reads_a_value_is_reported_once(tmp_path: Path) -> None:
    """The event names the line where the host waits for the device."""
    training = Training()
    lines = []

    def loss_fn(batch: Batch) -> torch.Tensor:
        loss = training.loss(batch)
        lines.append(inspect.currentframe().f_lineno + 1)  # type: ignore[union-attr]
        if loss.item() > 1e6:
            return loss * 0.5
        return loss

    with training.guard(tmp_path, "late") as guard:
        for batch in batches(5):
            guard.step(batch, loss_fn)

    event = the_event(guard, "loss_function_reads")
    assert event.data["file"] == __file__
    assert event.data["line"] == lines[0]


def test_on_the_cpu_nothing_is_late_by_default(tmp_path: Path) -> None:
    """``decide="auto"`` decides now on the CPU, and records no reason."""
    training = Training()
    with training.guard(tmp_path, "auto") as guard:
        result = guard.step(batches(1)[0], training.loss)
    assert not isinstance(result, UndecidedResult)
    assert not kinds_of(guard, "decided_now", "optimizer_not_fused")
