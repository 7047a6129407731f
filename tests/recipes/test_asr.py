"""The recogniser: what it counts, reads, refuses and sets aside.

That it learns, and goes on as if never stopped.
"""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from recipes.asr import forecast, train
from recipes.asr.corpus import CorpusError, Utterance, hold_out, read_corpus
from recipes.asr.data import CHARACTERS, Sound, Speech, collate
from recipes.asr.model import Recogniser, ctc
from recipes.asr.scoring import best_path, error_rates
from recipes.asr.speech import Plan, make_corpus
from recipes.wav import write_wav

from holdfast import Guard

SOUND = Sound(sample_rate=16000, n_mels=20)
POLICY = Path(train.__file__).with_name("policy.yaml")
SMALL = (
    "--speakers",
    "2",
    "--sentences",
    "8",
    "--words",
    "2",
    "--batch-size",
    "4",
    "--channels",
    "16",
    "--n-mels",
    "20",
    "--max-steps",
    "10",
    "--eval-interval-steps",
    "5",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small corpus in LibriSpeech's layout."""
    plan = Plan(speakers=2, sentences=3, words=2, sample_rate=16000, seed=0, held_out=False)
    return make_corpus(plan, tmp_path_factory.mktemp("speech"))


def run(run_dir: Path, *options: object) -> dict[str, Any]:
    return train.main([*SMALL, "--run-dir", str(run_dir), *map(str, options)])


@pytest.mark.slow  # torchmetrics takes seconds to import
def test_error_rates_count_the_fewest_edits():
    """Edits are Levenshtein's, over characters and over words, and what counts is the length of
    what was said.
    """
    assert error_rates(["kitten"], ["sitting"]) == {
        "character_error_rate": 3 / 6,
        "word_error_rate": 1.0,
    }
    found = error_rates(["the big dog", "a"], ["the dog", ""])
    assert found["character_error_rate"] == pytest.approx(5 / 12)
    assert found["word_error_rate"] == pytest.approx(2 / 4)


def test_best_path_joins_repeats_that_no_blank_parts():
    """What is heard twice without a blank between is one character, and frames behind the end do
    not count.
    """
    labels = torch.tensor([[0, 11, 11, 0, 14, 14, 0, 14, 17, 5, 5]])
    scores = torch.nn.functional.one_hot(labels, len(CHARACTERS) + 1).float()
    assert best_path(scores, torch.tensor([9])) == ["illo"]


def as_flac(corpus: Path, copy: Path) -> Path:
    """Write a corpus again as LibriSpeech is distributed.

    Its transcripts, and FLAC files of the same samples.
    """
    for path in corpus.rglob("*.*"):
        target = copy / path.relative_to(corpus)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".wav":
            soundfile.write(target.with_suffix(".flac"), *soundfile.read(path, dtype="int16"))
        else:
            target.write_bytes(path.read_bytes())
    return copy


def test_four_layouts_hold_the_same_utterances(corpus, tmp_path):
    """The same recordings as LibriSpeech (also in FLAC), LJSpeech and SpeechBrain have them give
    the same samples.
    """
    utterances = read_corpus(corpus)
    (tmp_path / "wavs").mkdir()
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ID", "duration", "wav", "spk_id", "wrd"])
        writer.writerows(
            [each.name, 1.0, each.path, each.speaker, each.text] for each in utterances
        )
    for each in utterances:
        (tmp_path / "wavs" / f"{each.name}.wav").symlink_to(each.path)
    rows = [f"{each.name}|{each.text}|{each.text.lower()}" for each in utterances]
    (tmp_path / "metadata.csv").write_text("\n".join(rows))
    for place in (tmp_path, tmp_path / "train.csv", as_flac(corpus, tmp_path / "flac")):
        one, other = (
            Speech(each, SOUND, augment=False) for each in (utterances, read_corpus(place))
        )
        assert len(one) == len(other) == 6
        for index, key in itertools.product(range(6), ("features", "labels")):
            assert torch.equal(one[index][key], other[index][key])
    assert {each.speaker for each in utterances} == {"1", "2"}


def test_a_corpus_that_is_none_is_refused(tmp_path):
    """A folder without transcripts, a CSV file without a column, and too few to hold out end
    with a fix.
    """
    (tmp_path / "bad.csv").write_text("ID,wav,txt\n1,a.wav,hello\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "twice.csv").write_text("ID,wav,wrd\n1,a.wav,hello\n1,b.wav,hello\n")
    (tmp_path / "huge.csv").write_text(f"ID,wav,wrd\n1,a.wav,{'a' * 200_000}\n")
    told = {"bad.csv": "no column 'wrd'", "empty": "no utterance", "no.csv": "cannot be read"}
    told |= {"twice.csv": "names more than once: 1", "huge.csv": "field larger than field limit"}
    for place, said in told.items():
        with pytest.raises(CorpusError, match=rf"(?s){said}.*Fix: "):
            read_corpus(tmp_path / place)
    with pytest.raises(
        CorpusError,
        match=r"3 utterances are too few .*: 20 are needed, .*\nFix: name others .*--held-out",
    ):
        hold_out([Utterance(name="a", path=tmp_path, text="a")] * 3)


@pytest.mark.parametrize(
    ("text", "damage", "said"),
    [
        ("", "", "holds no letter"),
        (" ?! ", "", "holds no letter"),
        ("seven of 9", "", "holds '9'"),
        ("hello" * 60, "", "characters in"),
        ("hello", "no wav", "no WAV file"),
        ("hello", "cut short", "ends after"),
        ("hello", "rate", "8000 samples a second"),
        ("hello", "missing", "No such file"),
    ],
)
def test_what_cannot_be_used_says_why(text, damage, said, corpus, tmp_path):
    """A text without letters, with digits or too long, and a recording that is none, are errors
    that say why.
    """
    good, path = read_corpus(corpus)[0].path, tmp_path / "a.wav"
    if damage == "rate":
        write_wav(path, np.ones(8000, dtype=np.float32), 8000)
    elif damage != "missing":
        path.write_bytes(
            {"no wav": b"RIFF or not", "cut short": good.read_bytes()[:2000]}.get(damage, b"")
        )
    path = path if damage else good
    with pytest.raises((ValueError, OSError), match=said):
        Speech([Utterance(name="a", path=path, text=text)], SOUND, augment=False)[0]


def test_a_sentence_is_heard_alike_alone_and_beside_longer_ones(corpus):
    """Padding changes neither scores nor loss, so that parts of a batch add up to the whole of
    it.
    """
    data = Speech(read_corpus(corpus), SOUND, augment=False)
    samples = sorted((data[index] for index in range(4)), key=lambda each: len(each["features"]))
    torch.manual_seed(0)
    model = Recogniser(n_mels=20, channels=16, blocks=2, dropout=0.0).double()
    samples = [{**each, "features": each["features"].double()} for each in samples]
    whole, parts = ctc(model, collate(samples)), [ctc(model, collate([each])) for each in samples]
    total = sum(float(part.mean.detach()) * int(part.items) for part in parts)
    assert total / sum(int(part.items) for part in parts) == pytest.approx(
        float(whole.mean.detach()), rel=1e-5
    )


@pytest.mark.parametrize("spoilt", ["--data", "--held-out"])
@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (
            8000,
            (
                "20 of 20 recordings that were looked at have another sample rate than 16000 Hz:"
                " 8000 Hz (20)"
            ),
        ),
        (8000, "\nFix: --sample-rate 8000, or resample all files once"),
        (16000, "20 of 20 samples cannot be used, such as: "),
        (
            16000,
            (
                "has 2 channels; 1 is needed.\nLimit: --quarantine 0.01 sets 1 of these"
                " aside.\nFix: mix it down"
            ),
        ),
    ],
)
def test_a_corpus_that_cannot_be_used_ends_with_its_reason(
    spoilt, rate, said, corpus, tmp_path, capsys
):
    """Of another rate, or of two channels: before there is a run, with code 2."""
    plan = Plan(speakers=2, sentences=10, words=1, sample_rate=rate, seed=0, held_out=False)
    places = {"--data": corpus, "--held-out": corpus} | {spoilt: make_corpus(plan, tmp_path)}
    for path in places[spoilt].rglob("*.wav") if rate == 16000 else ():
        soundfile.write(path, np.zeros((1600, 2)), rate, subtype="PCM_16")
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run", *itertools.chain(*places.items()), "--eval-interval-steps", 1)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_what_a_forecast_is_made_of_trains(tmp_path):
    """The factory that `holdfast plan` is given makes sentences of several lengths, and a step
    that commits.
    """
    built = forecast.build(3, 70)
    assert built["batch"]["frames"].tolist() == [70, 63, 57]
    assert built["batch"]["characters"].tolist() == [10, 9, 8]
    with Guard(tmp_path, model=built["model"], optimizer=built["optimizer"]) as guard:
        result = guard.step(built["batch"], built["loss_fn"])
    assert not result.skipped
    assert torch.isfinite(result.loss)


@pytest.mark.slow
def test_it_learns_to_recognise_voices_that_it_never_heard(tmp_path):
    """In 140 steps over twelve voices the error rate of four others falls from 1 to below 0.6."""
    options = (
        "--speakers",
        12,
        "--sentences",
        16,
        "--words",
        3,
        "--batch-size",
        16,
        "--channels",
        128,
    )
    options += ("--n-mels", 40, "--max-steps", 140, "--eval-interval-steps", 140)
    assert run(tmp_path / "run", *options)["figures"]["character_error_rate"] < 0.6
