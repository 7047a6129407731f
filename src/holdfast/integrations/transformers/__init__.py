"""Guarded training in Hugging Face's Trainer.

Each optimizer step is a transaction, each checkpoint is verified.

    from holdfast.integrations.transformers import HoldfastTrainer  # or HoldfastSeq2SeqTrainer

    policy = {"drop_nonfinite_samples": True}
    trainer = HoldfastTrainer(model, args, train_dataset=..., holdfast_policy=policy)
    trainer.train(resume_from_checkpoint=True)

    class MyTrainer(HoldfastMixin, SFTTrainer): ...                     # any other Trainer

A ``get_train_dataloader`` of your own may return a `holdfast.DataLoader`, which is not to be
prepared: workers that die are replaced, samples are quarantined by their index in the dataset, and
training resumes in its order.

The Trainer keeps its loop, data, evaluation, logs, schedule and checkpoints. What happens between
the first forward pass of a step and its optimizer is the guard's. The micro-batches of
``gradient_accumulation_steps`` are gathered, and trained at the last of them: ``on_substep_end``
comes before, ``on_pre_optimizer_step`` after the step is made.
"""

from __future__ import annotations

from typing import Any

from holdfast.integrations.protocol import load
from holdfast.integrations.transformers.checkpoints import last_good_checkpoint
from holdfast.integrations.transformers.trainer import HoldfastMixin

__all__ = ["HoldfastMixin", "HoldfastSeq2SeqTrainer", "HoldfastTrainer", "last_good_checkpoint"]

HoldfastTrainer: Any  # made when they are asked for, since their bases take seconds to import
HoldfastSeq2SeqTrainer: Any

_BUILT = {"HoldfastTrainer": "Trainer", "HoldfastSeq2SeqTrainer": "Seq2SeqTrainer"}


def __getattr__(name: str) -> Any:
    if name not in _BUILT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    about = {"__module__": __name__, "__doc__": HoldfastMixin.__doc__}
    globals()[name] = type(
        name, (HoldfastMixin, getattr(load("transformers"), _BUILT[name])), about
    )
    return globals()[name]
