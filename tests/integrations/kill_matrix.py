"""Lives of one training under one host, killed and resumed in every way.

Started by `test_kill_matrix`.

Imports the host once and forks for each life. A life writes one line for each step that it makes:
which samples, and a digest of what they were augmented to. A kill is a SIGKILL inside an optimizer
step. Where two follow on each other, one life shows what a kill in each of its steps leaves: all
its threads stop, and its files are copied.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast

SIZE, EPOCHS = 2, 3
Data = torch.utils.data.Dataset[Any]


class Samples(Data):
    """Numbers that are augmented with every source of chance there is, or with none."""

    def __init__(self, count: int, *, noisy: bool) -> None:
        self.count, self.noisy = count, noisy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.randn(4) * random.random() if self.noisy else torch.zeros(4)
        x = torch.arange(4.0).sub(1.5).mul(index % 7).cos() + 0.1 * noise
        return {"x": x, "y": x.sum().view(1), "index": torch.tensor(index)}


class Net(nn.Module):
    """A network with what a resume could lose: dropout, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1)
        )

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the loss, and note what it is of."""
        LIFE.note([index.tolist(), hashlib.sha1(x.numpy().tobytes()).hexdigest()[:6]])
        return {"loss": (self.body(x) - y).square().mean()}


class Life:
    """The life that this process is: its host writes to the folder, and it to the log.

    `kill` is the optimizer step to die in, counted from 1; 0 for none, -1 to stop in each until it
    is continued. Settings are ``ours`` or ``torch``, batches of an epoch, batches of a step, steps
    from save to save.
    """

    def __init__(
        self, folder: Path, log: Path, kill: int, settings: tuple[str, int, int, int]
    ) -> None:
        self.folder, self.kill, self.steps = folder, kill, 0
        self.loader_kind, self.batches, self.accumulate, self.every = settings
        self._process, self._seen = os.getpid(), []
        self._log = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def say(self, line: str) -> None:
        """Write a line that outlives this process."""
        os.write(self._log, f"{line}\n".encode())

    def note(self, batch: list[Any]) -> None:
        """Note a batch that is trained.

        A guard may try it several times, also in a copy of this process.
        """
        if os.getpid() == self._process and batch not in self._seen:
            self._seen.append(batch)

    def begin(self, step: int) -> None:
        """Note from which step of the training this life goes on."""
        self.say(json.dumps({"from": step}))

    def end(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Note what a whole training has led to."""
        found = hashlib.sha1()
        states = optimizer.state_dict()["state"]
        for each in (
            *model.state_dict().values(),
            *(v for s in states.values() for v in s.values()),
        ):
            found.update(torch.as_tensor(each).numpy().tobytes())
        self.say(json.dumps({"steps": steps, "digest": found.hexdigest()}))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return one that kills this process in its step."""
        made = torch.optim.AdamW(model.parameters(), lr=0.02)
        made.register_step_pre_hook(self._step)
        return made

    def _step(self, *_: object) -> None:
        self.steps += 1
        self.say(json.dumps(self._seen))
        self._seen = []
        if self.steps == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kill == -1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def loader(self, *, noisy: bool = True, **given: Any) -> Any:
        """Return the loader of this column, shuffled."""
        data = Samples(SIZE * self.batches, noisy=noisy)
        if self.loader_kind == "ours":
            return holdfast.DataLoader(data, batch_size=SIZE, shuffle=True, seed=5, **given)
        return torch.utils.data.DataLoader(data, batch_size=SIZE, shuffle=True, **given)


LIFE: Life


# --- one training under each host


def guard() -> None:
    """The loop of a `holdfast.Guard`."""
    model = Net()
    optimizer = LIFE.optimizer(model)
    made = holdfast.Guard(
        LIFE.folder / "run",
        model=model,
        optimizer=optimizer,
        loader=LIFE.loader(),
        policy={"save_interval_steps": LIFE.every},
    )
    _guarded(made, model, model, optimizer)


def _guarded(made: holdfast.Guard, called: Any, model: Any, optimizer: Any) -> None:
    with made:
        for number, batch in enumerate(made.batches(max_epochs=EPOCHS)):
            if number == 0:
                LIFE.begin(made.global_step)
            made.step(batch, lambda part: called(**part)["loss"])
    LIFE.end(model, optimizer, made.global_step)


def accelerate() -> None:
    """A guard of what an Accelerator has prepared."""
    from accelerate import Accelerator

    from holdfast.integrations.accelerate import accelerate_guard

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=LIFE.accumulate)
    model = Net()
    bare, loader = LIFE.optimizer(model), LIFE.loader()
    prepared, optimizer = accelerator.prepare(model, bare)
    if LIFE.loader_kind == "torch":
        loader = accelerator.prepare(loader)
    made = accelerate_guard(
        accelerator,
        model=prepared,
        optimizer=optimizer,
        loader=loader,
        run_dir=LIFE.folder / "run",
        save_interval_steps=LIFE.every,
    )
    _guarded(made, prepared, model, bare)


def _plain(epochs: Callable[[Any, dict[str, Any]], Iterable[int]]) -> None:
    """A loop over our loader that saves its position with everything else, as with torchdata's
    loader.
    """
    model, file = Net(), LIFE.folder / "state.pt"
    optimizer, loader = LIFE.optimizer(model), LIFE.loader()
    state: dict[str, Any] = {"step": 0, "epoch": 0}
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["random"])
    LIFE.begin(state["step"])
    for epoch in epochs(loader, state):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
            state["step"] += 1
            if state["step"] % LIFE.every == 0:
                kept = {
                    "epoch": epoch,
                    "loader": loader.state_dict(),
                    "random": torch.get_rng_state(),
                }
                kept |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, **kept}, file.with_suffix(".tmp"))
                file.with_suffix(".tmp").replace(file)
    LIFE.end(model, optimizer, state["step"])


def loop() -> None:
    """A loop that goes on with the epoch that it saved in, although nothing may be left of it."""
    _plain(lambda loader, state: range(state["epoch"], EPOCHS))


def counting_loop() -> None:
    """A loop that counts an epoch as done after its last batch, and names each epoch."""

    def epochs(loader: Any, state: dict[str, Any]) -> Iterable[int]:
        for epoch in range(state["step"] // len(loader), EPOCHS):
            loader.set_epoch(epoch)
            yield epoch

    _plain(epochs)


def trainer() -> None:
    """Hugging Face's Trainer."""
    from transformers import TrainingArguments

    from holdfast.integrations.transformers import HoldfastTrainer

    class Own(HoldfastTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return LIFE.loader() if LIFE.loader_kind == "ours" else super().get_train_dataloader()

        def training_step(self, *given: Any, **named: Any) -> Any:
            if not self.begun:
                self.begun = True
                LIFE.begin(self.state.global_step)
            return super().training_step(*given, **named)

    model = Net()
    optimizer = LIFE.optimizer(model)
    args = TrainingArguments(
        output_dir=str(LIFE.folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=SIZE,
        save_steps=LIFE.every,
        gradient_accumulation_steps=LIFE.accumulate,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=7,
        logging_strategy="no",
        remove_unused_columns=False,
        save_strategy="steps",
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    data = Samples(SIZE * LIFE.batches, noisy=False)
    made = Own(model, args, train_dataset=data, optimizers=(optimizer, schedule))
    made.begun = False
    made.train(resume_from_checkpoint=True)
    LIFE.end(model, optimizer, made.state.global_step)


def lightning() -> None:
    """Lightning with the strategy; with torch's loader it is exact from the end of an epoch."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from holdfast.integrations.lightning import HoldfastStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.begun = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not self.begun:
                self.begun = True
                LIFE.begin(self.trainer.global_step)
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            self.made = LIFE.optimizer(self)
            return [self.made], [torch.optim.lr_scheduler.StepLR(self.made, 1, 0.9)]

    module, saved = Module(), LIFE.folder / "saved"
    every = LIFE.every if LIFE.loader_kind == "ours" else LIFE.batches // LIFE.accumulate
    newest = max(saved.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), default=None)
    made = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        strategy=HoldfastStrategy(),
        accumulate_grad_batches=LIFE.accumulate,
        default_root_dir=LIFE.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(saved, "{step}", every_n_train_steps=every, save_top_k=-1)],
    )
    torch.manual_seed(11)
    made.fit(module, LIFE.loader(), ckpt_path=newest)
    LIFE.end(module, module.made, made.global_step)


def speechbrain() -> None:
    """SpeechBrain's Brain with the mixin, and its own loader or ours."""
    import speechbrain as sb
    from speechbrain.utils.checkpoints import Checkpointer
    from speechbrain.utils.epoch_loop import EpochCounter

    from holdfast.integrations.speechbrain import HoldfastMixin

    class Brain(HoldfastMixin, sb.Brain):  # type: ignore[misc]
        begun = False

        def compute_forward(self, batch: Any, stage: Any) -> Any:
            if not self.begun:
                self.begun = True
                LIFE.begin(self.optimizer_step)
            return self.modules.net(**batch)["loss"]

        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            return predictions

        def init_optimizers(self) -> None:
            self.optimizer = LIFE.optimizer(self.modules)
            self.optimizers_dict = {"adam": self.optimizer}
            self.checkpointer.add_recoverable("adam", self.optimizer)

    net, counter = Net(), EpochCounter(EPOCHS)
    kept = Checkpointer(LIFE.folder / "save", {"net": net, "counter": counter})
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "ckpt_interval_steps": LIFE.every * LIFE.accumulate,
        "grad_accumulation_factor": LIFE.accumulate,
    }
    made = Brain(
        {"net": net}, run_opts=options, checkpointer=kept, holdfast_run_dir=LIFE.folder / "run"
    )
    torch.manual_seed(11)
    if LIFE.loader_kind == "ours":
        made.fit(counter, LIFE.loader())
    else:
        made.fit(
            counter,
            Samples(SIZE * LIFE.batches, noisy=True),
            train_loader_kwargs={"batch_size": SIZE, "shuffle": True},
        )
    LIFE.end(net, made.optimizer, made.optimizer_step)


HOSTS = {
    each.__name__: each
    for each in (guard, accelerate, loop, counting_loop, trainer, lightning, speechbrain)
}
IMPORTS = {
    "guard": [],
    "loop": [],
    "counting_loop": [],
    "accelerate": ["accelerate", "holdfast.integrations.accelerate"],
    "trainer": ["transformers.trainer", "holdfast.integrations.transformers.trainer"],
    "lightning": ["lightning.pytorch", "holdfast.integrations.lightning"],
    "speechbrain": ["speechbrain", "holdfast.integrations.speechbrain"],
}


# --- every way to kill it


class Column:
    """All lives of one host with one loader; settings as `Life` takes them."""

    def __init__(self, folder: Path, host: str, settings: tuple[str, int, int, int]) -> None:
        self._host, self._settings = host, settings
        self._folder, self._work, self._log = folder, folder / "work", folder / "log"
        self.trained, self.result = [], None
        begun, self.trained, self.result = self._live(0)
        assert begun == 0, "the first life begins at the beginning"
        self.steps = self.result["steps"]
        self.wrong: list[str] = []

    def kill_once(self) -> None:
        """Kill for real at every second step, and resume, from each checkpoint.

        `kill_twice` has every step.
        """
        for first in range(1, self.steps + 1, 2):
            self._anew()
            self._check(f"killed in step {first}", self._live(first), killed=True)
            self._check(f"killed in step {first}", self._live(0))

    def kill_twice(self) -> None:
        """Kill at every step, and from every checkpoint at every distance after the resume.

        Two steps that follow on each other lead to the same checkpoint: each has every other
        distance.
        """
        self._anew()
        for first, left in enumerate(self._live_through("first", "not killed"), 1):
            self._anew(left)
            for second, left_then in enumerate(
                self._live_through("second", f"killed in step {first}"), 1
            ):
                if (first + second) % 2:
                    continue
                self._anew(left_then)
                self._check(f"killed in step {first}, and {second} after the resume", self._live(0))

    def _live_through(self, name: str, what: str) -> list[Path]:
        """Run one life to its end, and return what a kill in each of its steps would have left."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        left: list[Path] = []

        def keep() -> None:
            left.append(self._folder / name / str(len(left)))
            shutil.copytree(self._work, left[-1])

        self._check(what, self._live(-1, keep))
        return left

    def _check(self, what: str, found: tuple[int, list[Any], Any], *, killed: bool = False) -> None:
        begun, trained, result = found
        expected = self.trained[begun : begun + len(trained)] if killed else self.trained[begun:]
        if trained != expected:
            self.wrong.append(
                f"{what}: from step {begun} on other batches: {trained} instead of {expected}"
            )
        elif not killed and result != self.result:
            self.wrong.append(f"{what}: from step {begun} {result} instead of {self.result}")

    def _anew(self, left: Path | None = None) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        if left is not None:
            left.rename(self._work)

    def _live(
        self, kill: int, stopped: Callable[[], None] = lambda: None
    ) -> tuple[int, list[Any], Any]:
        """Run one life, and return the step that it began at, what its steps were of, and its
        result.
        """
        self._log.unlink(missing_ok=True)
        self._work.mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                global LIFE
                LIFE = Life(self._work, self._log, kill, self._settings)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # hosts print
                torch.set_num_threads(1)
                random.seed(11)  # a fork of Python's own would begin with another
                torch.manual_seed(11)
                HOSTS[self._host]()
                code = 0
            finally:
                sys.stderr.flush()
                if code:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
        while os.WIFSTOPPED(ended := os.waitpid(child, os.WUNTRACED)[1]):
            stopped()
            os.kill(child, signal.SIGCONT)
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        assert os.waitstatus_to_exitcode(ended) in ((0, -signal.SIGKILL) if kill > 0 else (0,)), (
            ended
        )
        begun = next(
            (line["from"] for line in lines if "from" in line), self.steps if self.result else 0
        )
        result = next((line for line in lines if "digest" in line), None)
        return begun, [line for line in lines if isinstance(line, list)], result


def main(
    folder: str, host: str, loader: str, batches: str, accumulate: str, every: str, kills: str
) -> None:
    """Print what differs from the undisturbed training."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    # The first of these is imported by the first step of an optimizer.
    for name in ("torch._dynamo", "holdfast.guard.guard", *IMPORTS[host]):
        importlib.import_module(name)
    os.fsync = lambda _: None  # who is killed leaves what was written all the same
    if kills == "twice":  # what a first step finds out in forks, it finds out in the other lives
        importlib.import_module(
            "holdfast.guard.splitting.split_trials"
        ).backward_works_in_a_copy = lambda: False
    gc.freeze()  # a collection in a fork would look at all that was imported, and copy its pages
    column = Column(Path(folder), host, (loader, int(batches), int(accumulate), int(every)))
    (column.kill_once if kills == "once" else column.kill_twice)()
    sys.stdout.write("\n".join(column.wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
