"""The same training in the loop of transformers' Seq2SeqTrainer, whose every step is holdfast's
transaction.

It has the loop, the evaluations, the logs and the checkpoints; batches, optimizer and schedule are
those of the plain loop, so that both end with the same weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast import Policy
from recipes.options import nothing_to_resume
from recipes.pegasus.job import Job, tokenized
from recipes.pegasus.scoring import ROUGE, rouge
from recipes.training import Training, end_failed, end_interrupted, is_interactive, tell_if_ended

_USUAL_SAVE_STEPS = 500  # of TrainingArguments
_USUAL_WIDTH = 80  # of a terminal
_NAMES = {"step": "step", "held_out_loss": "eval_loss"} | {name: f"eval_{name}" for name in ROUGE}


def train_with_trainer(job: Job, policy: Policy) -> dict[str, Any]:
    """Train to the end, and return what result.json holds.

    What ends it early ends the process, as in the plain loop.

    Raises:
        HoldfastError: H312 for checkpoints none of which is whole.
    """
    from transformers import ProgressCallback

    from holdfast.integrations.transformers import last_good_checkpoint
    from recipes.pegasus.train import finished

    trainer, options = make_trainer(job, policy), job.options
    newest = last_good_checkpoint(trainer.args.output_dir)
    if newest is None and options.resume:
        print(nothing_to_resume(options.run_dir), end="", file=sys.stderr)
        raise SystemExit(2)
    if newest is not None:
        step = newest.rpartition("-")[2]
        print(f"going on from step {step} ({newest})", file=sys.stderr)
        if tell_if_ended(int(step), options.max_steps):
            trainer.pop_callback(ProgressCallback)  # of a bar without a step
    _train(trainer, newest, options.run_dir)
    # Else bf16 would go on in its forward
    trainer.accelerator.unwrap_model(job.model, keep_fp32_wrapper=False)
    job.model.eval()
    with torch.no_grad():
        figures = finished(job)
    logged = [point for point in trainer.state.log_history if "eval_rouge1" in point]
    curve = [{name: point[theirs] for name, theirs in _NAMES.items()} for point in logged]
    return Training(trainer.trained_by, options).finish(job.model, {**figures, "curve": curve})


def _train(trainer: Any, newest: str | None, run_dir: Path) -> None:
    """Train; Ctrl-C ends the process after the step and with a checkpoint, an error of holdfast
    with a report.
    """
    try:
        trainer.train(resume_from_checkpoint=newest)
    except KeyboardInterrupt:
        if is_interactive() or trainer.trained_by is None or trainer.trained_by.stop_reason is None:
            raise
        end_interrupted(trainer.trained_by, run_dir, saves=trainer.args.save_strategy != "no")
    except Exception as error:
        if trainer.trained_by is not None and not is_interactive():
            end_failed(trainer.trained_by, run_dir, error)
        raise


def make_trainer(job: Job, policy: Policy) -> Any:
    """Return a Seq2SeqTrainer of a job.

    Args:
        job: Its loader, optimizer and schedule are used; ``gradient_accumulation_steps`` of its
            batches are one update.
        policy: What TrainingArguments have too is set there: clipping, precision, the saving of
            checkpoints.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from holdfast.integrations.transformers import HoldfastMixin

    options, saves = job.options, policy.save_interval_steps

    class SummaryTrainer(HoldfastMixin, Seq2SeqTrainer):  # type: ignore[misc]
        """Takes its batches from holdfast's loader."""

        trained_by: Any = None

        def get_train_dataloader(self) -> Any:
            """Return the loader of the plain loop, with its order, its quarantine and its
            workers that heal.
            """
            return job.loader

        def _holdfast_open(self, model: torch.nn.Module) -> Any:
            """Remember the guard beyond the end of the training."""
            self.trained_by = super()._holdfast_open(model)
            return self.trained_by

        def _run_epoch(self, *arguments: Any, **named: Any) -> Any:
            """Begin no epoch where all steps are made.

            Transformers 5.17 would make one more at each start.
            """
            if self.state.global_step < self.args.max_steps:
                return super()._run_epoch(*arguments, **named)
            self.control.should_training_stop = True
            return None

        def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
            """Take up the guard's state where no step was left to make."""
            if self.trained_by is None:
                self._holdfast_open(self.model)
            return super()._finalize_training(*arguments, **named)

        def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
            """Evaluate; random numbers go on as if it had not been, as in the plain loop."""
            with torch.random.fork_rng():
                found: dict[str, float] = super().evaluate(*arguments, **named)
            return found

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(options.run_dir / "trainer"),
        max_steps=options.max_steps,
        seed=options.seed,
        per_device_train_batch_size=options.batch_size // options.gradient_accumulation_steps,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        per_device_eval_batch_size=50,
        max_grad_norm=policy.max_grad_norm or 0.0,
        bf16=policy.precision == "bf16",
        fp16=policy.precision == "fp16",
        eval_strategy="steps",
        eval_steps=options.eval_steps,
        predict_with_generate=True,
        generation_max_length=options.max_target_length + 1,
        generation_num_beams=options.num_beams,
        save_strategy="no" if saves is None else "steps",
        save_total_limit=policy.keep_latest_k,
        save_steps=saves if isinstance(saves, int) else _USUAL_SAVE_STEPS,
        logging_steps=50,
        report_to="none",
        remove_unused_columns=False,
        use_cpu=job.device.type == "cpu",
        disable_tqdm=not sys.stderr.isatty(),
    )
    trainer = SummaryTrainer(
        model=job.model,
        args=arguments,
        processing_class=job.tokenizer,
        data_collator=job.loader.collate_fn,
        train_dataset=job.loader.dataset,
        eval_dataset=tokenized(job.held_out.pairs(), job.tokenizer, options),
        compute_metrics=lambda found: _metrics(job, found.predictions),
        optimizers=(job.optimizer, job.scheduler),
        holdfast_policy=policy.replace(save_interval_steps=None),
        holdfast_run_dir=str(options.run_dir),
    )
    torch.manual_seed(options.seed)  # as in the plain loop: making a Trainer draws
    _give_the_bar_a_width(trainer)
    return trainer


def _give_the_bar_a_width(trainer: Any) -> None:
    """Draw the Trainer's bar on terminals that tell no width too, as those of `script` or
    `docker exec -t`.
    """
    from transformers import ProgressCallback

    class Bar(ProgressCallback):
        """The Trainer's own; tqdm takes such a width for -1, and draws nothing."""

        def on_train_begin(self, *arguments: Any, **named: Any) -> None:
            """Begin, and see to the width."""
            super().on_train_begin(*arguments, **named)
            bar = self.training_bar
            if bar is not None and bar.ncols is not None and bar.ncols <= 0:
                bar.dynamic_ncols, bar.ncols, bar.nrows = None, _USUAL_WIDTH, None

    if trainer.pop_callback(ProgressCallback) is not None:  # there is none where nobody sees it
        trainer.add_callback(Bar)


def _metrics(job: Job, predictions: Any) -> dict[str, float]:
    """Return the scores of generated tokens, of which the Trainer fills up rows with -100."""
    tokens = np.where(predictions < 0, job.tokenizer.pad_token_id, predictions)
    return rouge(
        job.tokenizer.batch_decode(tokens, skip_special_tokens=True), job.held_out.summaries
    )
