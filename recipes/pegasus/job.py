"""What a run is made of: options, data, model, optimizer, loader.

Either loop begins with the same.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast import DataLoader
from holdfast.loader.order.orders import LengthBucketed
from recipes.options import RunOptions, insist_on_a_batch, insist_on_usable
from recipes.pegasus.corpus import collect, is_installed
from recipes.pegasus.model import Size, build_model, build_optimizer, load_pretrained, loss_of
from recipes.pegasus.records import JsonLines, RecordError, Records, TokenizedRecords
from recipes.pegasus.scoring import HeldOut, summarise
from recipes.pegasus.vocabulary import load_tokenizer
from recipes.training import find_device, making_the_model

_TRAINED_ON = "stdlib,accelerate,h5py,hypothesis,lightning,matplotlib,mpmath,numpy,rich,scipy,selenium,sympy,torch,transformers"
_CHARACTERS_PER_TOKEN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PegasusOptions(RunOptions):
    """Train Pegasus to summarise, on docstrings of the installed packages or on records of your
    own.
    """

    run_dir: Path = Path("runs/pegasus")
    """Directory of the run: checkpoints, records, vocabulary, report.html and result.json."""

    max_steps: int = 2000
    """Optimizer steps, counted over all restarts of the run."""

    loop: Literal["plain", "trainer"] = "plain"
    """A loop of our own, or that of transformers' Seq2SeqTrainer."""

    size: Size = "small"
    """Config of the model: one that learns on two CPU cores, or that of google/pegasus-large."""

    pretrained: Path | None = None
    """Folder of a model of transformers with its tokenizer, such as a copy of google/pegasus-large:
    it is fine-tuned. None: a new model, with a tokenizer of its own."""

    save_pretrained: bool = True
    """Whether the trained model is written to <run-dir>/model, for from_pretrained."""

    train_file: Path | None = None
    """JSON lines to train on. None: docstrings."""

    validation_file: Path | None = None
    """JSON lines that are held out."""

    text_column: str = "document"
    """Key of the document in a record of your own: article in exports of CNN/DailyMail."""

    summary_column: str = "summary"
    """Key of the summary: highlights in exports of CNN/DailyMail."""

    title_column: str | None = None
    """Key of a title, which is put before the document."""

    packages: str = _TRAINED_ON
    """Whose docstrings are trained on."""

    held_out_packages: str = "sklearn"
    """Whose docstrings are held out."""

    corpus_dir: Path = Path("runs/pegasus-corpus")
    """Where the docstrings are kept, for other runs too."""

    quarantine: float = 0.001
    """Most records that may be quarantined because they cannot be used.

    A share below 1, of which at least 1 may, or
    a number.
    """

    vocab_size: int = 4000
    """Most pieces of words that the tokenizer knows."""

    lowercase: bool = True
    """Whether a new tokenizer reads capitals as small letters: there are fewer words to learn."""

    max_source_length: int = 80
    """Tokens that a document is cut to."""

    max_target_length: int = 24
    """Tokens that a summary is cut to."""

    copied: float = 0.0
    """Share of the samples whose target is how the document begins, marked by <mask_1>, so that
    copying is learnt. With --pretrained there are none."""

    batch_size: int = 16
    """Records in an update, also where it is made in several micro-batches."""

    gradient_accumulation_steps: int = 1
    """Micro-batches that an update is made of from the start; each counts by the tokens of its
    summaries."""

    learning_rate: float = 2e-3
    """Highest rate of AdamW."""

    warmup_steps: int = 100
    """Steps until it is reached; then it falls, linearly, to nothing at the last step."""

    dropout: float = 0.0
    """Probability. The default run sees hardly a record twice."""

    num_beams: int = 4
    """Beginnings of a summary that are kept while it is written; 1: always the most probable next
    token."""

    eval_steps: int = 1000
    """Steps between evaluations on what is held out."""

    eval_records: int = 300
    """Held-out records that are scored."""

    def check(self) -> None:
        """Look at each option.

        Raises:
            OptionError: One has a value that makes no training.
        """
        RunOptions.check(self)
        self.at_least(
            {"batch_size": 1, "gradient_accumulation_steps": 1, "num_beams": 1, "eval_steps": 1}
        )
        # A tokenizer ends each text with a mark, beside which a word needs room; its alphabet needs
        # some pieces.
        self.at_least(
            {"max_source_length": 2, "max_target_length": 2, "eval_records": 2, "vocab_size": 50}
        )
        self.at_least({"warmup_steps": 0})
        for name in ("quarantine", "copied", "dropout"):
            self.at_least({name: 0})
        for name in ("copied", "dropout"):
            self.insist(name, getattr(self, name) <= 1, "a share from 0 to 1 is needed")
        self.above_zero("learning_rate")
        endless = self.loop == "trainer" and self.max_steps == 0  # it would take its three epochs
        self.insist("max_steps", not endless, "--loop trainer makes at least one step")
        whole = self.batch_size % self.gradient_accumulation_steps == 0
        self.insist(
            "gradient_accumulation_steps",
            whole,
            f"a divisor of --batch-size {self.batch_size} is needed",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that is trained, and with what."""

    options: PegasusOptions
    device: torch.device
    tokenizer: Any
    model: Any
    optimizer: Any
    scheduler: Any
    loader: DataLoader
    held_out: HeldOut
    scored: DataLoader

    def loss(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Return the loss of a batch, or of a part of one."""
        return loss_of(self.model, batch)

    def summaries(self) -> list[str]:
        """Return what the model writes about the held-out documents.

        It must be in evaluation mode.
        """
        options = self.options
        return summarise(
            self.model,
            self.tokenizer,
            self.held_out.documents,
            max_source_length=options.max_source_length,
            max_target_length=options.max_target_length,
            num_beams=options.num_beams,
        )

    def held_out_loss(self) -> float:
        """Return the mean over the tokens of the held-out summaries.

        The model must be in evaluation mode.
        """
        total = items = 0.0
        for batch in self.scored:
            found = self.loss(batch)
            total, items = (
                total + float(found.mean) * float(found.items),
                items + float(found.items),
            )
        return total / items


def make_job(options: PegasusOptions) -> Job:
    """Return the job of a run, the same at every start.

    Raises:
        OSError, ValueError: for data that cannot be used as a whole.
        LoaderError: for arguments of the loader.
    """
    torch.manual_seed(options.seed)
    device = find_device(options)
    train, validation = (_records(path, options) for path in _files(options))
    insist_on_a_batch(options.batch_size, len(train), "records")
    with making_the_model():
        tokenizer, model = _model(options, train)
        model.to(device).train()  # as it is loaded it would have no dropout
    optimizer, scheduler = build_optimizer(
        model,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        max_steps=options.max_steps,
    )
    held_out = HeldOut.of(validation, options.eval_records)
    torch.manual_seed(options.seed)  # dropout is that of the seed, however the weights were drawn
    return Job(
        options=options,
        device=device,
        tokenizer=tokenizer,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=_loader(train, tokenizer, options, device),
        held_out=held_out,
        scored=DataLoader(
            tokenized(held_out.pairs(), tokenizer, options),
            batch_size=50,
            **_batches(tokenizer, device),
        ),
    )


def _model(options: PegasusOptions, train: JsonLines) -> tuple[Any, Any]:
    """Return tokenizer and model."""
    positions = max(options.max_source_length, options.max_target_length + 1)
    if options.pretrained is not None:
        tokenizer, model = load_pretrained(options.pretrained)
        most = model.config.max_position_embeddings
        if positions > most:
            lengths = (
                f"--max-source-length {options.max_source_length}, --max-target-length"
                f" {options.max_target_length}"
            )
            raise ValueError(
                f"{lengths}: the model in {options.pretrained} has {most} positions, and summaries"
                " need one more.\nFix: shorter ones."
            )
        return tokenizer, model
    kept = options.run_dir / "vocabulary.json"
    tokenizer = load_tokenizer(kept, train, options.vocab_size, lowercase=options.lowercase)
    return tokenizer, build_model(
        options.size, tokenizer, positions=positions, dropout=options.dropout
    )


def _files(options: PegasusOptions) -> tuple[Path, Path]:
    if (options.train_file is None) != (options.validation_file is None):
        raise RecordError(
            "--train-file and --validation-file belong together.\nFix: name both, or neither."
        )
    if options.train_file is not None and options.validation_file is not None:
        return options.train_file, options.validation_file
    train, held_out = (
        [name.strip() for name in names.split(",") if name.strip()]
        for names in (options.packages, options.held_out_packages)
    )
    if options.packages == _TRAINED_ON:  # nobody has asked for these by name
        missing = [name for name in train if not is_installed(name)]
        train = [name for name in train if name not in missing]
        if missing:
            print(
                f"not installed, so their docstrings are left out: {', '.join(missing)}",
                file=sys.stderr,
            )
    return collect(options.corpus_dir, train, held_out)


def _records(path: Path, options: PegasusOptions) -> JsonLines:
    if options.train_file is None:
        return JsonLines(path)
    columns = {"text_column": options.text_column, "summary_column": options.summary_column}
    try:
        return JsonLines(path, **columns, title_column=options.title_column)
    except OSError as error:
        option = "--train-file" if path == options.train_file else "--validation-file"
        fix = "name a file of JSON lines, each an object with a document and its summary"
        raise RecordError(
            f"{option} {path} cannot be read: {error.strerror}\nFix: {fix}."
        ) from error


def _loader(
    records: JsonLines, tokenizer: Any, options: PegasusOptions, device: torch.device
) -> DataLoader:
    """Return batches of records of about the same length, whole ones only."""
    micro_batch_size = options.batch_size // options.gradient_accumulation_steps
    lengths, troubles = records.sizes(_CHARACTERS_PER_TOKEN * options.max_source_length)
    insist_on_usable(troubles, len(records), options.quarantine)
    return DataLoader(
        tokenized(
            records,
            tokenizer,
            options,
            copied=options.copied if options.pretrained is None else 0.0,
        ),
        sampler=LengthBucketed(lengths, group=options.batch_size),
        batch_size=micro_batch_size if options.loop == "trainer" else options.batch_size,
        drop_last=True,
        seed=options.seed,
        quarantine=options.quarantine,
        num_workers=options.num_workers,
        **_batches(tokenizer, device),
    )


def tokenized(
    records: Records, tokenizer: Any, options: PegasusOptions, *, copied: float = 0.0
) -> TokenizedRecords:
    """Return records as the model is given them."""
    return TokenizedRecords(
        records,
        tokenizer,
        copied=copied,
        max_source_length=options.max_source_length,
        max_target_length=options.max_target_length,
    )


def _batches(tokenizer: Any, device: torch.device) -> dict[str, Any]:
    """Return how records become a batch, and where it goes."""
    from transformers import DataCollatorForSeq2Seq

    on_gpu = device.type == "cuda"
    return {
        "collate_fn": DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
        "pin_memory": on_gpu,
        "device": device if on_gpu else None,
    }
