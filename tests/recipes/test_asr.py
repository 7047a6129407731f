"""The recogniser: what it counts, reads, refuses and sets aside; that it learns, and goes on as if never stopped."""

from __future__ import annotations

import csv
import itertools
import json
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
from recipes.asr.scoring import best_path, edits
from recipes.asr.speech import Plan, make_corpus
from recipes.options import read_options
from recipes.wav import write_wav
from typer.testing import CliRunner

from holdfast import Guard
from holdfast.cli.main import make_app
from holdfast.loader.quarantine import FILE_NAME, read_ledger

SOUND = Sound(sample_rate=16000, n_mels=20)
POLICY = Path(train.__file__).with_name("policy.yaml")
SMALL = (
    "--speakers", "2", "--sentences", "8", "--words", "2", "--batch-size", "4", "--channels", "16", "--n-mels", "20",
    "--max-steps", "10", "--eval-interval-steps", "5",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small corpus in LibriSpeech's layout."""
    plan = Plan(speakers=2, sentences=3, words=2, sample_rate=16000, seed=0, held_out=False)
    return make_corpus(plan, tmp_path_factory.mktemp("speech"))


def run(run_dir: Path, *options: object) -> dict[str, Any]:
    return train.main([*SMALL, "--run-dir", str(run_dir), *map(str, options)])


def test_edits_are_the_fewest():
    """Edits are counted as Levenshtein did, over characters and over words."""
    assert edits("kitten", "sitting") == 3
    assert edits("", "abc") == edits("abc", "") == 3
    assert edits(["the", "big", "dog"], ["the", "dog"]) == 1


def test_best_path_joins_repeats_that_no_blank_parts():
    """What is heard twice without a blank between is one character, and frames behind the end do not count."""
    labels = torch.tensor([[0, 11, 11, 0, 14, 14, 0, 14, 17, 5, 5]])
    scores = torch.nn.functional.one_hot(labels, len(CHARACTERS) + 1).float()
    assert best_path(scores, torch.tensor([9])) == ["illo"]


def test_three_layouts_hold_the_same_utterances(corpus, tmp_path):
    """The same recordings as LibriSpeech, LJSpeech and SpeechBrain's CSV have them give the same samples."""
    utterances = read_corpus(corpus)
    (tmp_path / "wavs").mkdir()
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ID", "duration", "wav", "spk_id", "wrd"])
        writer.writerows([each.name, 1.0, each.path, each.speaker, each.text] for each in utterances)
    for each in utterances:
        (tmp_path / "wavs" / f"{each.name}.wav").symlink_to(each.path)
    rows = [f"{each.name}|{each.text}|{each.text.lower()}" for each in utterances]
    (tmp_path / "metadata.csv").write_text("\n".join(rows))
    for place in (tmp_path, tmp_path / "train.csv"):
        one, other = (Speech(each, SOUND, augment=False) for each in (utterances, read_corpus(place)))
        assert len(one) == len(other) == 6
        for index, key in itertools.product(range(6), ("features", "labels")):
            assert torch.equal(one[index][key], other[index][key])
    assert {each.speaker for each in utterances} == {"1", "2"}


def test_a_corpus_that_is_none_is_refused(tmp_path):
    """A folder without transcripts, a CSV file without a column, and too few to hold out end with a fix."""
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
        CorpusError, match=r"3 utterances are too few .*: 20 are needed, .*\nFix: name others .*--held-out"
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
    """A text without letters, with digits or too long, and a recording that is none, are errors that say why."""
    good, path = read_corpus(corpus)[0].path, tmp_path / "a.wav"
    if damage == "rate":
        write_wav(path, np.ones(8000, dtype=np.float32), 8000)
    elif damage != "missing":
        path.write_bytes({"no wav": b"RIFF or not", "cut short": good.read_bytes()[:2000]}.get(damage, b""))
    path = path if damage else good
    with pytest.raises((ValueError, OSError), match=said):
        Speech([Utterance(name="a", path=path, text=text)], SOUND, augment=False)[0]


def test_a_sentence_is_heard_alike_alone_and_beside_longer_ones(corpus):
    """Padding changes neither scores nor loss, so that parts of a batch add up to the whole of it."""
    data = Speech(read_corpus(corpus), SOUND, augment=False)
    samples = sorted((data[index] for index in range(4)), key=lambda each: len(each["features"]))
    torch.manual_seed(0)
    model = Recogniser(n_mels=20, channels=16, blocks=2, dropout=0.0).double()
    samples = [{**each, "features": each["features"].double()} for each in samples]
    whole, parts = ctc(model, collate(samples)), [ctc(model, collate([each])) for each in samples]
    total = sum(float(part.mean.detach()) * int(part.items) for part in parts)
    assert total / sum(int(part.items) for part in parts) == pytest.approx(float(whole.mean.detach()), rel=1e-5)


def test_augmentation_follows_from_the_seed_of_a_sample(corpus):
    """Equal random numbers make equal samples, others make others, and no augmentation needs none."""
    plain, varied = (Speech(read_corpus(corpus), SOUND, augment=augment) for augment in (False, True))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append((varied[0]["features"], plain[0]["features"]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][0].shape != found[2][0].shape or not torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[0][1], found[2][1])


def test_a_recording_that_is_none_is_quarantined(corpus, tmp_path):
    """A run over a corpus with a broken WAV file trains on, without it, and its ledger says why."""
    copy = tmp_path / "corpus"
    for path in corpus.rglob("*.*"):
        target = copy / path.relative_to(corpus)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    bad = sorted(copy.rglob("*.wav"))[2]
    bad.write_bytes(b"not a wave")
    result = run(tmp_path / "run", "--data", copy, "--held-out", corpus, "--max-steps", 4, "--batch-size", 2)
    assert result["global_step"] == 4
    (aside,) = read_ledger(tmp_path / "run" / FILE_NAME).values()
    assert aside.index == 2
    assert "no WAV file" in aside.evidence


def read(*argv: object) -> tuple[train.Options, Any]:
    return read_options(train.Options, [str(each) for each in argv], policy_file=POLICY)


def test_clipping_is_the_preset_unless_something_stronger_says_otherwise(tmp_path):
    """The preset clips at 5.0; a SpeechBrain file, then an option, then its own gate are stronger; below 0 is off."""
    hparams, config = tmp_path / "train.yaml", tmp_path / "config.yaml"
    hparams.write_text("max_grad_norm: 2.5\nlr: !ref <base_lr>\nmodel: !new:some.Model\nckpt_interval_steps: 50\n")
    config.write_text("clip_grad_norm: -1\nbatch_size: 3\n")
    assert read()[1].max_grad_norm == 5.0
    policy = read("--hparams", hparams)[1]
    assert (policy.max_grad_norm, policy.save_interval_steps, policy.clip_by) == (2.5, 50, "optimizer")
    assert read("--hparams", hparams, "--max-grad-norm", "1.5")[1].max_grad_norm == 1.5
    options, policy = read("--hparams", hparams, "--config", config)
    assert (options.batch_size, policy.max_grad_norm) == (3, None)
    assert read("--config", config, "--clip-grad-norm", 7)[1].max_grad_norm == 7


def test_an_error_of_the_training_ends_with_its_message(corpus, tmp_path, capsys):
    """What holdfast raises while it trains is told with where to read on, and code 1, not as a traceback."""
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run", "--data", corpus, "--held-out", corpus, "--blocks", 0, "--learning-rate", 1e30)
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "[H501]" in told
    assert f"holdfast explain {tmp_path / 'run'}" in told


@pytest.mark.parametrize("spoilt", ["--data", "--held-out"])
def test_a_corpus_of_another_sample_rate_ends_with_its_reason(corpus, tmp_path, capsys, spoilt):
    """Before there is a run: how many, of which rate, one of them and what to do, with code 2."""
    plan = Plan(speakers=2, sentences=10, words=1, sample_rate=8000, seed=0, held_out=False)
    places = {"--data": corpus, "--held-out": corpus} | {spoilt: make_corpus(plan, tmp_path)}
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run", *itertools.chain(*places.items()), "--eval-interval-steps", 1)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert (
        "20 of 20 recordings that were looked at have another sample rate than 16000 Hz: 8000 Hz (20), such as"
        in told
    )
    assert "\nFix: --sample-rate 8000, or resample all files once" in told
    assert told.count("Fix: ") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("spoilt", ["--data", "--held-out"])
def test_a_corpus_that_cannot_be_read_ends_with_its_reason(corpus, tmp_path, capsys, spoilt):
    """Nothing of it can be used: the file, what is wrong and what to do, code 1, a report, and no traceback."""
    plan = Plan(speakers=2, sentences=10, words=1, sample_rate=16000, seed=0, held_out=False)
    places = {"--data": corpus, "--held-out": corpus} | {spoilt: make_corpus(plan, tmp_path)}
    for path in places[spoilt].rglob("*.wav"):
        soundfile.write(path, np.zeros((1600, 2)), 16000, subtype="PCM_16")
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run", *itertools.chain(*places.items()), "--eval-interval-steps", 1)
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "has 2 channels; 1 is needed.\nFix: mix it down" in told
    assert "Traceback" not in told
    assert "2 channels" in json.loads((tmp_path / "run" / "result.json").read_text())["stopped"]
    assert (tmp_path / "run" / "report.html").is_file()


def as_flac(corpus: Path, copy: Path) -> Path:
    """Write a corpus again as LibriSpeech is distributed: its transcripts, and FLAC files of the same samples."""
    for path in corpus.rglob("*.*"):
        target = copy / path.relative_to(corpus)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".wav":
            soundfile.write(target.with_suffix(".flac"), *soundfile.read(path, dtype="int16"))
        else:
            target.write_bytes(path.read_bytes())
    return copy


def test_flac_files_train_as_the_wave_files_do(corpus, tmp_path):
    """LibriSpeech as it is distributed: the same weights, digests and error rates as from WAV files."""
    copy = as_flac(corpus, tmp_path / "flac")
    assert {each.path.suffix for each in read_corpus(copy)} == {".flac"}
    wave, flac = (
        run(tmp_path / name, "--data", data, "--held-out", data, "--max-steps", 3, "--batch-size", 6)  # all in one
        for name, data in (("one", corpus), ("other", copy))
    )
    assert wave["weights"] == flac["weights"]
    assert wave["figures"] == flac["figures"]


@pytest.mark.parametrize(
    "argv",
    [
        ("--clip-grad-norm", "0"),
        ("--hparams", "nowhere.yaml"),
        ("--hparams", str(POLICY), "--policy", str(POLICY)),
        ("--chanels", "8"),
        ("--data", "nowhere"),
        ("--held-out", "nowhere"),
    ],
)
def test_wrong_use_ends_with_a_message(argv, tmp_path, capsys):
    """Options that cannot be used end the process with code 2 and say what to do."""
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run", *argv)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "Fix: " in told or "did you mean" in told


def test_what_a_forecast_is_made_of_trains(tmp_path):
    """The factory that `holdfast plan` is given makes sentences of several lengths, and a step that commits."""
    built = forecast.build(3, 70)
    assert built["batch"]["frames"].tolist() == [70, 63, 57]
    assert built["batch"]["characters"].tolist() == [10, 9, 8]
    with Guard(tmp_path, model=built["model"], optimizer=built["optimizer"]) as guard:
        result = guard.step(built["batch"], built["loss_fn"])
    assert not result.skipped
    assert torch.isfinite(result.loss)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_plan_for_given_lengths(tmp_path):
    """`holdfast plan` takes the recipe's factory, for the longest of the lengths that it is given."""
    (tmp_path / "lengths.txt").write_text("40\n64\n")
    told = [f"{POLICY.with_name('forecast.py')}:build", "--device", "T4", "--precision", "fp32", "--json"]
    told += ["--global-batch-size", "8", "--lengths", str(tmp_path / "lengths.txt")]
    result = CliRunner().invoke(make_app("plan"), ["plan", *told])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["longest"] == 64
    assert all(row["micro_batch_size"] == 8 and row["live_bytes"] < 2**30 for row in found["rows"])
    assert found["traced"]["fp32"]["parameters"] == 6_267_421


@pytest.mark.slow
def test_it_learns_to_recognise_voices_that_it_never_heard(tmp_path):
    """In 140 steps over twelve voices the error rate of four others falls from 1 to below 0.6."""
    options = ("--speakers", 12, "--sentences", 16, "--words", 3, "--batch-size", 16, "--channels", 128)
    options += ("--n-mels", 40, "--max-steps", 140, "--eval-interval-steps", 140)
    assert run(tmp_path / "run", *options)["figures"]["character_error_rate"] < 0.6
