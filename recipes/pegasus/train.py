"""Trains Pegasus to summarise.

In a loop of our own under a `holdfast.Guard`, or in that of Seq2SeqTrainer.

    python -m recipes.pegasus
    python -m recipes.pegasus --loop trainer --run-dir runs/pegasus-trainer

Does not: make the corpus (see ``corpus``), read records (see ``records``) or build what is trained
(see ``job``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast import Guard, Policy, advise_learning_rate
from holdfast.core.durable import replace_file
from recipes.options import insist_on_installed, read_options
from recipes.pegasus.job import Job, PegasusOptions, make_job
from recipes.pegasus.records import RecordError
from recipes.pegasus.scoring import rouge
from recipes.training import Training, ending_clearly, open_guard

POLICY = Path(__file__).with_name("policy.yaml")
# Of a run in either loop
_CHECKPOINTS = {"plain": "checkpoints/*-step*", "trainer": "trainer/checkpoint-*"}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says, and return what result.json holds."""
    options, policy = read_options(PegasusOptions, argv, policy_file=POLICY)
    others = _CHECKPOINTS["plain" if options.loop == "trainer" else "trainer"]
    with ending_clearly(ValueError):
        insist_on_installed("accelerate", "torchmetrics", "transformers")
        if any(options.run_dir.glob(others)):
            raise RecordError(
                f"{options.run_dir} is a run of the other --loop.\nFix: give this one a --run-dir"
                " of its own."
            )
        job = make_job(options)
    _show_bars_on_terminals_only()
    _advise(job)
    with ending_clearly(RecordError, options.run_dir):
        if options.loop == "trainer":
            from recipes.pegasus.trainer import train_with_trainer

            return train_with_trainer(job, policy)
        return train(job, policy)


def _show_bars_on_terminals_only() -> None:
    """Have transformers draw none elsewhere, as that of the shards of a model that it writes."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


class Curve:
    """Scores of the evaluations so far, kept with the weights."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def newest(self) -> dict[str, float]:
        """Return what is worth showing of the last one."""
        return (
            {name: self.points[-1][name] for name in ("held_out_loss", "rouge1")}
            if self.points
            else {}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return them."""
        return {"points": self.points}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after these."""
        self.points = [dict(point) for point in state["points"]]


def train(job: Job, policy: Policy) -> dict[str, Any]:
    """Train in the plain loop to the end, and return what result.json holds."""
    curve, parts = Curve(), job.options.gradient_accumulation_steps
    if parts > 1 and policy.micro_batch_size in ("auto", None):
        policy = policy.replace(micro_batch_size=job.options.batch_size // parts)
    guard = open_guard(
        job.options,
        policy,
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        loader=job.loader,
        state={"curve": curve},
    )
    training = Training(guard, job.options)
    with guard:
        for batch in training.batches():
            result = guard.step(batch, job.loss)
            if not result.skipped and guard.global_step % job.options.eval_steps == 0:
                _evaluate(job, guard, curve)
            training.show(loss=float(result.loss), **curve.newest())
    with guard.evaluate():
        figures = finished(job)
    return training.finish(job.model, {**figures, "curve": curve.points})


def _evaluate(job: Job, guard: Guard, curve: Curve) -> None:
    with guard.evaluate():
        loss, scores = job.held_out_loss(), rouge(job.summaries(), job.held_out.summaries)
    guard.validated(loss)
    guard.log(scores, loss=loss, split="held out")
    curve.points.append({"step": guard.global_step, "held_out_loss": loss, **scores})


def finished(job: Job) -> dict[str, float]:
    """Return the scores of the model and of the baselines, and write both it and its summaries.

    Args:
        job: Its model is in evaluation mode.
    """
    written = job.summaries()
    lines = (
        {"document": document, "summary": summary, "written": text}
        for (document, summary), text in zip(job.held_out.pairs(), written, strict=True)
    )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    replace_file(job.options.run_dir / "summaries.jsonl", text.encode())
    if job.options.save_pretrained:
        job.model.save_pretrained(job.options.run_dir / "model")
        job.tokenizer.save_pretrained(job.options.run_dir / "model")
    records = float(len(written))
    return {
        "records": records,
        "held_out_loss": job.held_out_loss(),
        **job.held_out.figures(written),
    }


def _advise(job: Job) -> None:
    """Say what another batch would ask of the learning rate; it is left as it was given."""
    usual, chosen = PegasusOptions().batch_size, job.options.batch_size
    advice = advise_learning_rate(job.optimizer, usual, chosen, by="batch")
    if advice.factor != 1:
        print(
            f"--batch-size {chosen}: the learning rate that suits {usual} would be multiplied by"
            f" {advice.factor:.3g} ({advice.rule} rule, {advice.source}); it is left at"
            f" {job.options.learning_rate}",
            file=sys.stderr,
        )
