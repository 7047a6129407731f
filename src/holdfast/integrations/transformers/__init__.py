"""Guarded training in Hugging Face's Trainer.

    from holdfast.integrations.transformers import HoldfastTrainer  # or HoldfastSeq2SeqTrainer

    policy = {"drop_nonfinite_samples": True}
    trainer = HoldfastTrainer(model, args, train_dataset=..., holdfast_policy=policy)
    trainer.train(resume_from_checkpoint=True)

    class MyTrainer(HoldfastMixin, SFTTrainer): ...  # any other Trainer

The Trainer keeps its loop, data, evaluation, logs, schedule and checkpoints. These are the
differences from the plain Trainer:

- A guard runs each optimizer step as a transaction: the step survives out-of-memory errors, and is
  skipped if it yields NaN or Inf.
- With ``gradient_accumulation_steps``, the micro-batches are only collected until the last one of a
  step arrives. Then all of them are trained in one guarded step. Therefore, ``on_substep_end`` is
  called before training on the micro-batches, and ``on_pre_optimizer_step`` after the optimizer
  step.
- Each checkpoint is sealed when it is complete, and verified before it is loaded.
- ``resume_from_checkpoint=True`` starts a new run, with a warning, if there is no checkpoint yet.

Your ``get_train_dataloader`` may return an unprepared `holdfast.DataLoader`. In that case, dead
workers are replaced, bad samples are quarantined by their dataset index, and training resumes in
the loader's order.

Read in this order: ``trainer`` (the mixin), ``window_loss`` (how losses are normalized),
``positioned_loader`` (resuming within an epoch), ``checkpoints`` (the checkpoint folders),
``unsupported`` (settings that are refused).
"""

from __future__ import annotations

from typing import Any

from holdfast.integrations.refusals import load
from holdfast.integrations.transformers.checkpoints import last_good_checkpoint
from holdfast.integrations.transformers.trainer import HoldfastMixin

__all__ = ["HoldfastMixin", "HoldfastSeq2SeqTrainer", "HoldfastTrainer", "last_good_checkpoint"]

# These classes are created on first use, because their base classes take seconds to import.
HoldfastTrainer: Any
HoldfastSeq2SeqTrainer: Any
_BASE_CLASSES = {"HoldfastTrainer": "Trainer", "HoldfastSeq2SeqTrainer": "Seq2SeqTrainer"}


def __getattr__(name: str) -> Any:
    if name not in _BASE_CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(load("transformers"), _BASE_CLASSES[name])
    attributes = {"__module__": __name__, "__doc__": HoldfastMixin.__doc__}
    trainer_class = type(name, (HoldfastMixin, base), attributes)
    globals()[name] = trainer_class
    return trainer_class
