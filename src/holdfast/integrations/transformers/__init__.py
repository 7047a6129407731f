"""Guarded training in Hugging Face's Trainer.

    from holdfast.integrations.transformers import HoldfastTrainer  # or HoldfastSeq2SeqTrainer

    policy = {"drop_nonfinite_samples": True}
    trainer = HoldfastTrainer(model, args, train_dataset=..., holdfast_policy=policy)
    trainer.train(resume_from_checkpoint=True)

    class MyTrainer(HoldfastMixin, SFTTrainer): ...  # any other Trainer

The Trainer keeps its loop, data, evaluation, logs, schedule and checkpoints. Differences from the
plain Trainer:

- Each optimizer step is a transaction of a guard: it survives out-of-memory errors, and a step with
  NaN or Inf is skipped.
- The micro-batches of ``gradient_accumulation_steps`` are collected, and the step is made when the
  last of them arrives. So ``on_substep_end`` is called before any of them is trained, and
  ``on_pre_optimizer_step`` after the step.
- Each checkpoint is sealed when it is complete and verified before it is loaded.
- ``resume_from_checkpoint=True`` starts a new run, with a warning, if there is no checkpoint yet.

Your own ``get_train_dataloader`` may return an unprepared `holdfast.DataLoader`. Then dead workers
are replaced, bad samples are quarantined by their dataset index, and training resumes in the
loader's order.

How a step goes through the guard: ``HoldfastMixin.training_step`` collects the micro-batches and
passes them to ``Guard.step``.

Read in this order: ``trainer`` (the mixin), ``window_loss`` (how losses are normalised),
``positioned_loader`` (resuming within an epoch), ``checkpoints`` (the folders), ``unsupported``
(what is refused).
"""

from __future__ import annotations

from typing import Any

from holdfast.integrations.refusals import load
from holdfast.integrations.transformers.checkpoints import last_good_checkpoint
from holdfast.integrations.transformers.trainer import HoldfastMixin

__all__ = ["HoldfastMixin", "HoldfastSeq2SeqTrainer", "HoldfastTrainer", "last_good_checkpoint"]

# Created on first use, because their base classes take seconds to import.
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
