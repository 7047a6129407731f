"""One training in each framework.

A small classifier with all that a resume can lose, saved every few steps.

Settings are those that the documentation recommends for what can be interrupted: docs/scoreboard.md
has the sources.

python train.py FRAMEWORK [holdfast | careful | dcp]
"""

import pickle
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast

EPOCHS, BATCHES, SIZE, EVERY, WARM_UP, RATE = 3, 10, 8, 4, 5, 0.01
FRAMEWORK, WAY = [*sys.argv[1:], ""][:2]
GUARDED = WAY == "holdfast"
LOADING = {"batch_size": SIZE, "shuffle": True, "num_workers": 2}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class Samples(Dataset):
    """Points with noise that is drawn in the worker, as augmentation is, or that depends on
    epoch and index alone.
    """

    def __init__(self, count=BATCHES * SIZE, noise=0.1, epoch=None):
        self.x, self.noise, self.epoch = (
            torch.randn(count, 16, generator=seeded(count)),
            noise,
            epoch,
        )

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.randn(
            16, generator=None if self.epoch is None else seeded(1000 * self.epoch + index)
        )
        return {"x": self.x[index] + self.noise * noise, "labels": self.x[index, :4].argmax()}


class StatefulSamples(Samples):
    """Keeps its worker's random state.

    Https://docs.pytorch.org/data/main/stateful_dataloader_tutorial.html.
    """

    def state_dict(self):
        return {"random": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state["random"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2)
        self.body = nn.Sequential(*first, nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, x, labels=None):
        return {
            "loss": nn.functional.cross_entropy(logits := self.body(x), labels),
            "logits": logits,
        }


HELD_OUT = DataLoader(Samples(3 * SIZE, noise=0.0), batch_size=SIZE)


def loader(**given):
    """Return holdfast's loader, or torchdata's, which can go on within an epoch."""
    if GUARDED:
        return holdfast.DataLoader(Samples(), **LOADING, **given)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(StatefulSamples(), **LOADING, **given)


def optimizers(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=WARM_UP)


@torch.no_grad()
def validate(model):
    model.eval()
    loss = sum(float(model(**batch)["loss"]) for batch in HELD_OUT)
    model.train()
    return loss


def train_guarded(make, model, optimizer, scheduler, **given):
    """Train as docs/guide/guard.md says, but with saves in this thread.

    What goes on beside one is not observed.
    """
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader(**given),
    }
    guard = make(**parts, save_interval_steps=EVERY, async_save=False)
    for batch in guard.batches(max_epochs=EPOCHS):
        if guard.epochs_validated < guard.epoch:
            with guard.evaluate():
                guard.validated(validate(model))
        guard.step(batch, lambda part: model(**part)["loss"])


def plain():
    """PyTorch: as its tutorials do; `careful`: with what none of them asks for.

    `dcp`: as torchtitan saves.
    """
    torch.manual_seed(1)
    model = Net()
    optimizer, scheduler = optimizers(model)
    if GUARDED:
        return train_guarded(partial(holdfast.Guard, "run"), model, optimizer, scheduler)
    data, saved = loader(generator=seeded(0)), None
    epoch = done = step = 0
    if WAY == "dcp":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def state():
        states = (
            get_state_dict(model, optimizer)
            if WAY == "dcp"
            else (model.state_dict(), optimizer.state_dict())
        )
        other = torch.get_rng_state() if WAY == "careful" else pickle.dumps(data.state_dict())
        counts = {"epoch": epoch, "done": done, "step": step, "other": other}
        return counts | {
            "model": states[0],
            "optimizer": states[1],
            "scheduler": scheduler.state_dict(),
        }

    def rest(epoch, done):
        order = torch.randperm(BATCHES * SIZE, generator=seeded(epoch))[done * SIZE :]
        return DataLoader(
            Samples(epoch=epoch), SIZE, sampler=order.tolist(), num_workers=2, generator=seeded(0)
        )

    folders = sorted(path.parent for path in Path("saved").glob("*/.metadata"))
    if folders:
        saved = state()
        dcp.load(saved, checkpoint_id=folders[-1])
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
    elif Path("saved.pt").exists():
        saved = torch.load("saved.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if saved:
        scheduler.load_state_dict(saved["scheduler"])
        epoch, done, step = saved["epoch"], saved["done"], saved["step"]
        if WAY == "careful":
            torch.set_rng_state(saved["other"])
        else:
            data.load_state_dict(pickle.loads(saved["other"]))
    while epoch < EPOCHS:
        for batch in rest(epoch, done) if WAY == "careful" else data:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
            scheduler.step()
            step, done = step + 1, done + 1
            if step % EVERY == 0 and WAY == "dcp":
                dcp.save(state(), checkpoint_id=f"saved/{step:04}")
            elif step % EVERY == 0:
                torch.save(state(), new := "saved.new" if WAY == "careful" else "saved.pt")
                Path(new).replace("saved.pt")
        epoch, done = epoch + 1, 0
        validate(model)


def trainer():
    from transformers import Trainer, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    if GUARDED:
        from holdfast.integrations.transformers import HoldfastTrainer as Trainer

    set_seed(1)
    arguments = TrainingArguments(
        "output",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=SIZE,
        learning_rate=RATE,
        warmup_steps=WARM_UP,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=2,
        eval_strategy="epoch",
        dataloader_num_workers=2,
        seed=1,
        data_seed=1,
        enable_jit_checkpoint=not GUARDED,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    made = Trainer(Net(), arguments, train_dataset=Samples(), eval_dataset=HELD_OUT.dataset)
    if GUARDED:
        made.get_train_dataloader = loader
    made.train(resume_from_checkpoint=GUARDED or get_last_checkpoint("output"))


def lightning():
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(Net, pl.LightningModule):
        def training_step(self, batch, _):
            return self(**batch)["loss"]

        def validation_step(self, batch, _):
            self.log("validation", self(**batch)["loss"])

        def configure_optimizers(self):
            optimizer, scheduler = optimizers(self)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    pl.seed_everything(1, workers=True)
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if GUARDED:
        from holdfast.integrations.lightning import HoldfastStrategy

        settings["strategy"] = HoldfastStrategy()
    saves = ModelCheckpoint(
        "saved", every_n_train_steps=EVERY, save_last=True, save_on_exception=not GUARDED
    )
    made = pl.Trainer(max_epochs=EPOCHS, callbacks=[saves], **settings)
    made.fit(Module(), loader(), HELD_OUT, ckpt_path="last")


def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

    set_seed(1)
    saving = ProjectConfiguration("output", automatic_checkpoint_naming=True, total_limit=2)
    loading = DataLoaderConfiguration(
        use_seedable_sampler=True, use_stateful_dataloader=not GUARDED
    )
    accelerator, model, step = (
        Accelerator(cpu=True, dataloader_config=loading, project_config=saving),
        Net(),
        0,
    )
    model, optimizer, scheduler = accelerator.prepare(model, *optimizers(model))
    if GUARDED:
        from holdfast.integrations.accelerate import accelerate_guard

        return train_guarded(
            partial(accelerate_guard, accelerator), model, optimizer, scheduler, device="cpu"
        )
    data = accelerator.prepare(DataLoader(StatefulSamples(), **LOADING))
    if saves := [int(path.name.split("_")[1]) for path in Path("output/checkpoints").glob("*")]:
        accelerator.load_state()
        saving.iteration = 1 + max(saves)
        step = EVERY * saving.iteration
    for epoch in range(max(0, step - 1) // BATCHES, EPOCHS):  # the loader knows where in it
        data.set_epoch(epoch)
        for batch in data:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            step += 1
            if step % EVERY == 0:
                accelerator.save_state()
        validate(model)


def composer():
    """Composer; with holdfast its loader alone, for there is no integration."""
    from composer import Trainer
    from composer.callbacks import NaNMonitor
    from composer.models import ComposerModel
    from composer.optim import LinearWithWarmupScheduler
    from composer.utils import reproducibility

    class Classifier(Net, ComposerModel):
        def forward(self, batch):
            return super().forward(**batch)

        def loss(self, outputs, batch):
            return outputs["loss"]

    reproducibility.seed_all(1)
    model = Classifier()
    Trainer(
        model=model,
        train_dataloader=loader() if GUARDED else DataLoader(Samples(), **LOADING),
        seed=1,
        device="cpu",
        eval_dataloader=HELD_OUT,
        optimizers=optimizers(model)[0],
        max_duration=f"{EPOCHS}ep",
        progress_bar=False,
        schedulers=LinearWithWarmupScheduler(f"{WARM_UP}ba"),
        callbacks=[NaNMonitor()],
        save_folder="saved",
        save_interval=f"{EVERY}ba",
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        run_name="run",
    ).fit()


def speechbrain():
    import speechbrain as sb
    from speechbrain.nnet.schedulers import NoamScheduler
    from speechbrain.utils.checkpoints import Checkpointer
    from speechbrain.utils.epoch_loop import EpochCounter
    from speechbrain.utils.seed import seed_everything

    if GUARDED:
        from holdfast.integrations.speechbrain import HoldfastMixin

    class Classifier(*((HoldfastMixin,) if GUARDED else ()), sb.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(**batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions["loss"]

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if should_step:
                noam(self.optimizer)

        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage == sb.Stage.VALID:
                self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])

    seed_everything(1)
    net, counter, noam = Net(), EpochCounter(EPOCHS), NoamScheduler(RATE, WARM_UP)
    keeper = Checkpointer("saved", {"net": net, "counter": counter, "noam": noam})
    options = {
        "noprogressbar": True,
        "ckpt_interval_steps": EVERY,
        "skip_nonfinite_grads": not GUARDED,
    }
    made = Classifier(
        {"net": net}, lambda weights: torch.optim.AdamW(weights, lr=RATE), {}, options, keeper
    )
    made.fit(counter, loader() if GUARDED else Samples(), HELD_OUT, train_loader_kwargs=LOADING)


globals()[FRAMEWORK]()
