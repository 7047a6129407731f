"""The summariser: where its records come from, what is done about bad ones, what its scores are,
and its loops.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.pegasus.corpus import collect, records_in
from recipes.pegasus.job import Job, PegasusOptions, make_job
from recipes.pegasus.records import JsonLines, RecordError
from recipes.pegasus.scoring import HeldOut, rouge, summarise
from recipes.pegasus.train import POLICY, main, train

from holdfast import Policy
from holdfast.forecast.job.building import load_factory

# As in the recipe: its threads are in the way of a fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MODULE = '''
"""A module's own docstring is no record."""
raise RuntimeError("nobody shall import this")

def scale(values, factor):
    """Multiply every value
    by a factor.

    It is the number that :func:`~things.scale` takes, in *any* order.
    ----------
        >>> scale([1], 2)
    Nothing else is
    changed by it. Too short. It needs no memory. This is one sentence too many.
    """
    def inner():
        """Return a thing, from inside.

        This one lies in a function. It is found all the same.
        """

class Box:
    """Hold one thing at a time.

    {body}
    """
    def open(self):
        """One line alone has nothing to be summarised from."""

    def short(self):
        """Too short a body.

        One sentence beside it is not enough.
        """
'''
BODY = "Whatever is put into it stays there. Somebody takes it out again."


def lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_bytes(
        b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
    )
    return path


def pairs(count: int) -> list[dict[str, str]]:
    colours, things = ("red", "green", "blue", "grey"), ("boxes", "wheels", "doors", "lamps")
    return [
        {
            "document": (
                f"There are {number} of them. All {colours[number % 4]} {things[number // 4 % 4]}"
                " are old."
            ),
            "summary": f"Count the {colours[number % 4]} {things[number // 4 % 4]}.",
        }
        for number in range(count)
    ]


# --- the corpus


def test_records_are_taken_from_the_text_of_a_module() -> None:
    """A docstring's first sentence is the summary, the document has it among others, without
    markup, in any place.
    """
    found = list(records_in(MODULE.format(body=BODY), "things"))
    assert [(record["name"], record["summary"]) for record in found] == [
        ("things.scale", "Multiply every value by a factor."),
        ("things.Box", "Hold one thing at a time."),
        ("things.scale.inner", "Return a thing, from inside."),
    ]
    assert sorted(re.split(r"(?<=[.]) ", found[0]["document"])) == [
        "It is the number that things.scale takes, in any order.",
        "It needs no memory.",
        "Multiply every value by a factor.",
        "Nothing else is changed by it.",
    ]
    assert {record["document"].index(record["summary"]) for record in found} != {0}, (
        "the answer is not always first"
    )
    assert all(set(record) == {"document", "summary", "name"} for record in found)


def test_a_corpus_is_made_without_importing_and_holds_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages are read and not imported, tests left out, and what is held out shares no text
    with the rest.
    """
    other = MODULE.replace("Hold one thing at a time", "Keep a single item").replace(
        "scale", "grow"
    )
    for package, text in (("made_first", MODULE), ("made_second", other)):
        (tmp_path / package / "tests").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(
            text.format(body=f"{BODY} It is {package}.")
        )
        (tmp_path / package / "again.py").write_text(text.format(body=f"{BODY} It is {package}."))
        (tmp_path / package / "tests" / "more.py").write_text(
            text.format(body="In a test: " + BODY)
        )
        (tmp_path / package / "template.py").write_text("def {{ name }}(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    train, held_out = collect(tmp_path / "corpus", ["made_first"], ["made_second"])
    kept = [
        [json.loads(line)["summary"] for line in path.read_text().splitlines()]
        for path in (train, held_out)
    ]
    assert kept[0] == [
        "Multiply every value by a factor.",
        "Hold one thing at a time.",
        "Return a thing, from inside.",
    ]
    assert kept[1] == ["Keep a single item."]  # the other two documents are trained on
    assert not {"made_first", "made_second"} & set(sys.modules)
    before = train.read_bytes()
    assert (
        collect(tmp_path / "elsewhere", ["made_first"], ["made_second"])[0].read_bytes() == before
    )
    (tmp_path / "made_first" / "new.py").write_text(MODULE.format(body="Another text: " + BODY))
    assert collect(tmp_path / "corpus", ["made_first"], ["made_second"])[0] != train, (
        "an upgrade is another corpus"
    )


# --- records


def test_records_are_read_by_their_offsets(tmp_path: Path) -> None:
    """Any record can be read by itself, whatever its alphabet, with blank lines between, also by
    a pickled copy.
    """
    path = tmp_path / "records.jsonl"
    texts = [("Größe und Maß", "naïve"), ("二つの文", "短い"), ("plain", "text")]
    rows = [
        json.dumps({"id": 1, "article": a, "highlights": b}, ensure_ascii=False) for a, b in texts
    ]
    path.write_text("\n" + rows[0] + "\n\n  \n" + rows[1] + "\r\n" + rows[2], encoding="utf-8")
    records = JsonLines(path, text_column="article", summary_column="highlights")
    assert [records[index] for index in (2, 0, 1)] == [texts[2], texts[0], texts[1]]
    copy = pickle.loads(pickle.dumps(records))
    assert len(copy) == 3
    assert copy[1] == texts[1]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"document": "Some text."}, "'summary' is missing"),
        ({"document": "Some text.", "summary": None}, "'summary' is missing"),
        ({"document": "Some text.", "summary": " "}, "'summary' is ' '"),
        ({"document": "", "summary": "A text."}, "'document' is empty"),
        ({"document": ["a", "b"], "summary": "A text."}, r"'document' is \['a', 'b'\]"),
        (["document", "summary"], "list; an object is needed"),
        ("{", "str; an object is needed"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(tmp_path: Path, record: Any, said: str) -> None:
    """The error names the file, the record, its place and what is missing."""
    records = JsonLines(lines(tmp_path / "records.jsonl", [*pairs(2), record]))
    with pytest.raises(RecordError, match=f"records.jsonl, record 2 at byte [0-9]+: .*{said}"):
        records[2]


# --- scores


@pytest.mark.slow  # the package of the scores takes four seconds to import
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("police kill the gunman", (75, 100 / 3, 75)),
        ("the gunman kill police", (75, 100 / 3, 50)),
        ("police killed the gunman.", (100, 100, 100)),
        ("nothing of the kind", (25, 0, 25)),
        ("", (0, 0, 0)),
    ],
)
def test_rouge_is_what_its_author_says(written: str, expected: tuple[float, ...]) -> None:
    """The scores of the example in Lin (2004), section 3, and of borderline cases, are known."""
    found = rouge([written], ["Police killed the gunman"])
    assert tuple(found.values()) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_held_out_records_are_the_same_every_time_and_their_baselines_read_only_the_document(
    tmp_path: Path,
) -> None:
    """Which records are scored does not depend on the run; bad ones are left out.

    Copying copies the first words.
    """
    rows: list[Any] = [*pairs(40), {"document": "x"}]
    records = JsonLines(lines(tmp_path / "records.jsonl", rows))
    torch.manual_seed(5)
    held_out = HeldOut.of(records, 100)
    assert len(held_out.documents) == 40
    assert held_out == HeldOut.of(records, 100)
    assert HeldOut.of(records, 3).documents == held_out.documents[:3]
    found = held_out.baselines()
    assert all(
        document.startswith(text)
        for document, text in zip(held_out.documents, found["copied"], strict=True)
    )
    assert {len(text.split()) for text in found["copied"]} == {4}, "as long as the summaries are"
    scores = held_out.figures(held_out.summaries)
    assert scores["rouge1"] == scores["rouge2"] == scores["rougeL"] == pytest.approx(100)
    assert scores["exchanged_rouge1"] < 80
    with pytest.raises(RecordError, match="1 usable"):
        HeldOut.of(JsonLines(lines(tmp_path / "few.jsonl", rows[-2:])), 5)


# --- training


def tiny(folder: Path, run: str, **changes: Any) -> PegasusOptions:
    """Return options that train in a second or two."""
    settings: dict[str, Any] = {
        "run_dir": folder / run,
        "train_file": lines(folder / "train.jsonl", pairs(64)),
        "validation_file": lines(folder / "held-out.jsonl", pairs(8)),
        "vocab_size": 200,
        "max_source_length": 24,
        "max_target_length": 12,
        "batch_size": 8,
        "max_steps": 5,
        "warmup_steps": 2,
        "eval_steps": 3,
        "eval_records": 4,
        "dropout": 0.1,
        "learning_rate": 3e-3,
        "device": "cpu",
        "save_pretrained": False,
    }
    return PegasusOptions(**{**settings, **changes})


def trained(options: PegasusOptions, **settings: Any) -> tuple[Job, dict[str, Any]]:
    """Return a job and what came of it, in the loop that its options name."""
    from recipes.pegasus.trainer import train_with_trainer

    job, policy = make_job(options), Policy.from_yaml(POLICY, **settings)
    return job, (train_with_trainer if options.loop == "trainer" else train)(job, policy)


def weights(job: Job) -> torch.Tensor:
    return torch.cat(
        [
            value.detach().flatten().double()
            for value in job.model.parameters()
            if value.requires_grad
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_loops_end_with_the_same_weights(tmp_path: Path, precision: str) -> None:
    """With dropout, clipping and an evaluation on the way, the plain loop and Seq2SeqTrainer's
    agree bit for bit.
    """
    plain, trainer = (
        trained(tiny(tmp_path, loop, loop=loop), precision=precision)
        for loop in ("plain", "trainer")
    )
    assert plain[1]["global_step"] == trainer[1]["global_step"] == 5
    assert plain[1]["weights"] == trainer[1]["weights"]
    assert not torch.equal(weights(plain[0]), weights(make_job(tiny(tmp_path, "fresh"))))
    ours, theirs = plain[1]["figures"], trainer[1]["figures"]
    # The Trainer evaluates in bf16 too
    assert ours["curve"][0] == pytest.approx(theirs["curve"][0], rel=1e-3)
    assert {**ours, "curve": None} == {**theirs, "curve": None}


@pytest.mark.slow
def test_a_trainer_that_is_started_again_ends_where_it_would_have(tmp_path: Path) -> None:
    """From a checkpoint in the middle of an epoch the Trainer goes on with the right batches,
    bit for bit.
    """
    options = tiny(tmp_path, "run", loop="trainer", max_steps=6)
    _, whole = trained(options, save_interval_steps=2, keep_latest_k=9)
    early, late = (options.run_dir / "trainer" / f"checkpoint-{step}" for step in (2, 6))
    written = (early / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(late)
    _, again = trained(options, save_interval_steps=2, keep_latest_k=9)
    assert again["weights"] == whole["weights"]
    assert again["global_step"] == 6
    assert (early / "model.safetensors").stat().st_mtime_ns == written, "it was not begun anew"
    with pytest.raises(SystemExit, match="2"):
        main(["--run-dir", str(options.run_dir)])  # the plain loop has no business there


@pytest.mark.slow
def test_an_error_in_the_trainer_leaves_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records that are damaged while it trains, beyond --quarantine, end it with the reason, a
    page and code 1.
    """
    from recipes.pegasus.trainer import train_with_trainer

    options = tiny(tmp_path, "run", loop="trainer", max_steps=9)
    job = make_job(options)
    whole = options.train_file.read_bytes()
    options.train_file.write_bytes(whole.replace(b'"summary": "Count', b'"summary": 7"ount', 2))
    with pytest.raises(SystemExit) as ended:
        train_with_trainer(job, Policy.from_yaml(POLICY))
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "[H612]" in told
    assert "What was found meanwhile: holdfast explain" in told
    assert "H612" in (options.run_dir / "report.html").read_text()
    assert json.loads((options.run_dir / "result.json").read_text())["stopped"]


def test_records_beyond_the_quarantine_end_the_run_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is known to be unusable when the file is looked through is not found out step by
    step.
    """
    rows: list[Any] = pairs(64)
    rows[5], rows[9] = {"document": "Nobody has summarised this."}, {"summary": "Of nothing."}
    files = {
        "train": lines(tmp_path / "bad.jsonl", rows),
        "validation": lines(tmp_path / "held.jsonl", pairs(8)),
    }
    arguments = [part for name, path in files.items() for part in (f"--{name}-file", str(path))]
    arguments += ["--run-dir", str(tmp_path / "run"), "--vocab-size", "200", "--max-steps", "9"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "2 of 64 samples cannot be used, such as: " in told
    assert "bad.jsonl, record 5 at byte" in told
    assert "Limit: --quarantine 0.001 sets 1 of these aside.\nFix: " in told
    assert not (tmp_path / "run" / "events").exists()


@pytest.mark.slow
def test_accumulation_counts_tokens_in_both_loops(tmp_path: Path) -> None:
    """Four micro-batches of ragged summaries make the update of their whole batch, up to
    rounding, in either loop.
    """
    whole, _ = trained(tiny(tmp_path, "whole", dropout=0.0))
    start = weights(make_job(tiny(tmp_path, "fresh", dropout=0.0)))
    moved = (weights(whole) - start).norm()
    for loop in ("plain", "trainer"):
        parts, _ = trained(
            tiny(tmp_path, loop, dropout=0.0, loop=loop, gradient_accumulation_steps=4)
        )
        assert (weights(parts) - weights(whole)).norm() < 1e-3 * moved, loop


@pytest.mark.slow
def test_it_learns_what_it_is_shown_and_can_be_taken_elsewhere(tmp_path: Path) -> None:
    """Shown sixteen records often, it writes their summaries.

    What it saves is fine-tuned from where it stands.
    """
    rows = lines(tmp_path / "few.jsonl", pairs(16))
    options = tiny(
        tmp_path,
        "few",
        train_file=rows,
        validation_file=rows,
        max_steps=100,
        batch_size=16,
        eval_records=16,
        eval_steps=50,
        learning_rate=5e-3,
        dropout=0.0,
        copied=0.0,
        save_pretrained=True,
    )
    job, result = trained(options)
    figures = result["figures"]
    assert figures["rougeL"] > 95
    assert figures["exchanged_rougeL"] < 80
    assert figures["copied_rougeL"] < 50
    assert figures["curve"][0]["held_out_loss"] > figures["curve"][1]["held_out_loss"]
    beginnings, bodies = zip(*(each.split(". ") for each in job.held_out.documents), strict=True)
    swapped = [
        f"{one}. {other}" for one, other in zip(beginnings, bodies[1:] + bodies[:1], strict=True)
    ]
    lengths = {"max_source_length": 24, "max_target_length": 12, "num_beams": 4}
    written = summarise(job.model.eval(), job.tokenizer, swapped, **lengths)
    expected = job.held_out.summaries[1:] + job.held_out.summaries[:1]
    assert rouge(written, expected)["rougeL"] > 80, "it follows the body, whatever stands before it"
    again = make_job(tiny(tmp_path, "again", pretrained=options.run_dir / "model"))
    assert torch.equal(weights(again), weights(job))
    assert again.tokenizer("boxes.")["input_ids"] == job.tokenizer("boxes.")["input_ids"]
    with pytest.raises(ValueError, match=r"--max-source-length 99, .* has 24 positions.*\nFix: "):
        make_job(tiny(tmp_path, "long", pretrained=options.run_dir / "model", max_source_length=99))
    (options.run_dir / "model/config.json").write_text('{"model_type": "bart"}')
    with pytest.raises(ValueError, match=r"a model of type 'bart'; 'pegasus' is needed.\nFix: "):
        make_job(tiny(tmp_path, "bart", pretrained=options.run_dir / "model"))


@pytest.mark.slow
def test_the_forecast_is_about_the_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `holdfast plan` is pointed at builds Pegasus-large, 568 million trained parameters,
    and a batch for it.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))  # the folder of the file is put there
    build = load_factory(f"{POLICY.with_name('forecast.py')}:build")
    with torch.device("meta"):
        found = build(2, 64)
    trained_ones = sum(each.numel() for each in found["model"].parameters() if each.requires_grad)
    assert trained_ones == pytest.approx(568e6, rel=5e-3)
    assert [tuple(each.shape) for each in found["batch"].values()] == [(2, 64), (2, 64), (2, 16)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train-file", "missing.jsonl"], "--train-file and --validation-file belong together"),
        (
            ["--train-file", "missing.jsonl", "--validation-file", "missing.jsonl"],
            "--train-file missing.jsonl cannot be read: No such file or directory\nFix: ",
        ),
        (
            ["--packages", "json", "--held-out-packages", "no_such_package"],
            "'no_such_package' is not installed",
        ),
        (
            ["--batch-size", "10", "--gradient-accumulation-steps", "3"],
            "a divisor of --batch-size 10",
        ),
        (["--batch-size", "0"], "--batch-size 0; at least 1 is needed"),
        (["--gradient-accumulation-steps", "0"], "at least 1 is needed"),
        (["--eval-steps", "0"], "at least 1 is needed"),
        (["--num-beams", "0"], "at least 1 is needed"),
        (["--max-target-length", "1"], "at least 2 is needed"),
        (["--vocab-size", "-1"], "at least 50 is needed"),
        (["--copied", "1.5"], "a share from 0 to 1 is needed"),
        (["--learning-rate", "0"], "a number above 0 is needed"),
        (["--loop", "trainer", "--max-steps", "0"], "--loop trainer makes at least one step"),
        (
            [
                "--pretrained",
                "nowhere",
                "--packages",
                "json",
                "--held-out-packages",
                "csv",
                "--batch-size",
                "4",
            ],
            "holds no config.json",
        ),
    ],
)
def test_what_cannot_be_trained_ends_with_a_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    """Wrong files, packages and sizes end the process with exit code 2 and a line that says what
    is wrong.
    """
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--run-dir", "run", "--corpus-dir", "corpus"])
    assert said in capsys.readouterr().err
