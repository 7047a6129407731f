"""What summaries are worth.

ROUGE of what the model writes about held-out documents, and of what needs no model.

copied     the first words of what the model is given: of the title, if there is one, and of the
           document
body       the first words of the document, without its title
title      the title alone
random     as many words of what the model is given, drawn
exchanged  the model's own summaries, each of another document: what is left of the score if it
           reads none
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recipes.pegasus.records import JsonLines, RecordError

ROUGE = ("rouge1", "rouge2", "rougeL")
_SEED = 7  # of which records are scored: the same in every run


def rouge(written: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L in percent, without stemming.

    Args:
        written: Summaries.
        references: The summary that each should be.

    Raises:
        ValueError: for none at all, or another number of references.
    """
    from torchmetrics.functional.text import rouge_score

    if not written or len(written) != len(references):
        raise ValueError(f"{len(written)} summaries for {len(references)} references")
    found = rouge_score(list(written), [[reference] for reference in references], rouge_keys=ROUGE)
    return {name: 100 * float(found[f"{name}_fmeasure"]) for name in ROUGE}


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Documents that are never trained on, with the summaries that they should get."""

    documents: list[str]
    summaries: list[str]
    titled: bool = False
    """Whether the first line of each document is a title."""

    @classmethod
    def of(cls, records: JsonLines, most: int) -> HeldOut:
        """Return some records, spread over the file, the same every time.

        Those that cannot be used are left out.

        Args:
            records: All of them.
            most: How many.

        Raises:
            RecordError: if there are fewer than two, so that none could be given another's summary.
        """
        found, bad = [], 0
        for index in random.Random(_SEED).sample(range(len(records)), len(records)):  # noqa: S311 - no secret
            if len(found) == most:
                break
            try:
                found.append(records[index])
            except RecordError:
                bad += 1
        if len(found) < 2:
            raise RecordError(
                f"{records.path}: {len(found)} usable records to hold out and {bad} others; 2 are"
                " needed.\nFix: name a file with more of them, or a larger --eval-records."
            )
        return cls(
            [document for document, _ in found], [summary for _, summary in found], records.titled
        )

    def pairs(self) -> list[tuple[str, str]]:
        """Return document and summary of each."""
        return list(zip(self.documents, self.summaries, strict=True))

    def baselines(self) -> dict[str, list[str]]:
        """Return summaries that no model has written, as long as summaries are here."""
        words = round(statistics.mean(len(summary.split()) for summary in self.summaries))
        draw = random.Random(_SEED)  # noqa: S311
        cut = [document.split() for document in self.documents]
        drawn = [draw.sample(each, min(words, len(each))) for each in cut]
        found = {
            "copied": [" ".join(each[:words]) for each in cut],
            "random": [" ".join(each) for each in drawn],
        }
        if self.titled:
            lines = [document.partition("\n") for document in self.documents]
            found["title"] = [title for title, _, _ in lines]
            found["body"] = [" ".join(body.split()[:words]) for _, _, body in lines]
        return found

    def figures(self, written: Sequence[str]) -> dict[str, float]:
        """Return the scores of what a model has written about the documents, and of the
        baselines beside it.
        """
        others = {**self.baselines(), "exchanged": [*written[1:], written[0]]}
        scores = rouge(written, self.summaries)
        return scores | {
            f"{name}_{which}": value
            for name, texts in others.items()
            for which, value in rouge(texts, self.summaries).items()
        }


def summarise(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    max_source_length: int,
    max_target_length: int,
    num_beams: int,
) -> list[str]:
    """Return what the model writes about each document.

    The most probable text that a search by beams finds.

    Args:
        model: Pegasus, in evaluation mode.
        tokenizer: Its own.
        documents: Texts.
        max_source_length: Tokens that they are cut to.
        max_target_length: Most tokens of a summary.
        num_beams: Beginnings that are kept; 1: the most probable next token at each place.
    """
    written: list[str] = []
    device = next(model.parameters()).device
    for start in range(0, len(documents), 50):
        batch = tokenizer(
            list(documents[start : start + 50]),
            truncation=True,
            max_length=max_source_length,
            padding=True,
            return_tensors="pt",
        ).to(device)
        with torch.no_grad():
            tokens = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_length=max_target_length + 1,
                num_beams=num_beams,
                do_sample=False,
            )
        written += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return written
