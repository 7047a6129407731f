"""The separator: what it measures, mixes, reads and refuses.

That it learns, and goes on as if never stopped.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes.asr.corpus import CorpusError
from recipes.asr.speech import Plan, make_corpus
from recipes.separation import train
from recipes.separation.data import CutMixtures
from recipes.separation.mixtures import Mixture, make_mixtures, mixed, read_mixtures, read_speakers
from recipes.separation.model import ConvTasNet
from recipes.separation.si_snr import best_order, separation_loss, si_snr
from recipes.wav import read_wav, write_wav

RATE = 8000
POLICY = Path(train.__file__).with_name("policy.yaml")
NETWORK = (
    "--filters",
    "16",
    "--bottleneck",
    "8",
    "--hidden",
    "16",
    "--blocks",
    "3",
    "--seconds",
    "0.5",
)
SMALL = (
    *NETWORK,
    "--speakers",
    "3",
    "--sentences",
    "4",
    "--words",
    "2",
    "--batch-size",
    "4",
    "--max-steps",
    "10",
    "--eval-interval-steps",
    "5",
)


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a folder of recordings for each of three speakers."""
    plan = Plan(speakers=3, sentences=2, words=2, sample_rate=RATE, seed=0, held_out=False)
    return make_corpus(plan, tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def mixtures(speakers: Path) -> Path:
    """Return a folder in the layout of WSJ0-2mix."""
    return make_mixtures(
        read_speakers(speakers), speakers.parent / "mixed", many=3, sample_rate=RATE, seed=0
    )


def tiny() -> ConvTasNet:
    torch.manual_seed(0)
    return ConvTasNet(filters=16, length=16, bottleneck=8, hidden=16, blocks=3, repeats=2)


def run(run_dir: Path, *options: object) -> dict[str, Any]:
    return train.main([*SMALL, "--run-dir", str(run_dir), *map(str, options)])


@pytest.mark.slow  # torchmetrics takes seconds to import
def test_the_ratio_is_that_of_energies_whatever_the_scale():
    """An estimate with orthogonal noise of a hundredth of its energy has 20 dB, also scaled and
    shifted.
    """
    time = torch.arange(800, dtype=torch.float64) / 800
    source, noise = (torch.sin(2 * torch.pi * cycles * time) for cycles in (5, 11))
    for scale, shift in ((1.0, 0.0), (-3.0, 0.5)):
        assert float(si_snr(scale * (source + 0.1 * noise) + shift, source)) == pytest.approx(
            20.0, abs=1e-4
        )


@pytest.mark.slow  # torchmetrics takes seconds to import
def test_sources_are_found_in_whatever_order_they_come():
    """The best order of the estimates is found for each sample by itself."""
    sources = torch.randn(2, 2, 400)
    estimates = torch.stack([sources[0], sources[1].flip(0)]) + 0.01 * torch.randn(2, 2, 400)
    ratios, order = best_order(estimates, sources)
    assert order.tolist() == [[0, 1], [1, 0]]
    assert ratios.min() > 30


def test_the_paper_s_sizes_have_the_paper_s_parameters():
    """With the sizes of the paper the parameters are those that its formulas give for a net
    without skip outputs.
    """
    n, length, b, h, p, blocks = 512, 16, 128, 512, 3, 8 * 3
    model = ConvTasNet(filters=n, length=length, bottleneck=b, hidden=h, blocks=8, repeats=3)
    block = (b * h + h) + 1 + 2 * h + (h * p + h) + 1 + 2 * h + (h * b + b)
    expected = (
        n * length + 2 * n + (n * b + b) + blocks * block + 1 + (b * 2 * n + 2 * n) + n * length
    )
    assert sum(each.numel() for each in model.parameters()) == expected


@pytest.mark.slow  # torchmetrics takes seconds to import
def test_the_threshold_takes_the_gradient_of_what_is_separated_well():
    """A mixture whose loss is below the threshold moves nothing; the others move as without it."""
    model = tiny()
    mixture, sources = torch.randn(4, 400), torch.randn(4, 2, 400)
    losses = -best_order(model(mixture), sources)[0].detach()
    between = float(losses.sort().values[1:3].mean())
    gradients = []
    for chosen, threshold in ((losses > between, None), (losses > -1e9, between)):
        model.zero_grad()
        loss = separation_loss(model, (mixture[chosen], sources[chosen]), threshold)
        (loss.mean * loss.items).backward()
        gradients.append(model.narrow.weight.grad.clone())
    assert torch.allclose(*gradients, atol=1e-6)


def test_a_mixture_is_the_sum_of_its_sources_at_the_level_that_was_drawn():
    """Sources add up to the mixture, differ in power by the level, and nothing is beyond the
    peak.
    """
    random = np.random.default_rng(0)
    first, second = (
        random.standard_normal(4000).astype(np.float32) * scale for scale in (1.0, 30.0)
    )
    mixture, sources = mixed(first, second, 4.0)
    assert np.allclose(sources.sum(0), mixture, atol=1e-6)
    powers = (sources.astype(np.float64) ** 2).mean(1)
    assert 10 * np.log10(powers[0] / powers[1]) == pytest.approx(4.0, abs=1e-3)
    assert np.abs(mixture).max() <= 0.9 + 1e-6


def test_three_layouts_hold_the_same_mixtures(mixtures, tmp_path):
    """Folders as WSJ0-2mix's and LibriMix's, and SpeechBrain's CSV file, give the same samples."""
    for name, source in (("mix_clean", "mix"), ("s1", "s1"), ("s2", "s2")):
        (tmp_path / name).symlink_to(mixtures / source)
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ID", "duration", "mix_wav", "s1_wav", "s2_wav"])
        writer.writerows(
            [
                path.stem,
                1.0,
                f"$data_root/mix_clean/{path.name}",
                f"s1/{path.name}",
                mixtures / "s2" / path.name,
            ]
            for path in sorted((mixtures / "mix").iterdir())
        )
    sets = [
        CutMixtures(read_mixtures(place), sample_rate=RATE, samples=None)
        for place in (mixtures, tmp_path, tmp_path / "train.csv")
    ]
    assert [len(each) for each in sets] == [3, 3, 3]
    for index in range(3):
        mixture, sources = sets[0][index]
        assert torch.allclose(sources.sum(0), mixture, atol=1e-3)  # as far as 16 bits go
        assert all(torch.equal(mixture, other[index][0]) for other in sets)
        assert all(torch.equal(sources, other[index][1]) for other in sets)


def test_mixtures_that_cannot_be_used_say_why(mixtures, tmp_path):
    """A folder without mixtures, sources of another length, a file that is missing or of another
    rate are errors.
    """
    for place in (tmp_path, tmp_path / "no.csv"):
        with pytest.raises(CorpusError, match="Fix: "):
            read_mixtures(place)
    with pytest.raises(CorpusError, match="two speakers"):
        read_speakers(mixtures / "mix")
    good = read_mixtures(mixtures)[0]
    short, slow = tmp_path / "short.wav", tmp_path / "slow.wav"
    write_wav(short, read_wav(good.sources[1], RATE)[:-1], RATE)
    write_wav(slow, read_wav(good.sources[1], RATE), 16000)
    for second, said in (
        (short, "one stretch of time"),
        (slow, "16000 samples"),
        (tmp_path / "none.wav", "No such"),
    ):
        odd = Mixture(name="odd", path=good.path, sources=(good.sources[0], second))
        with pytest.raises((ValueError, OSError), match=said):
            CutMixtures([odd], sample_rate=RATE, samples=None)[0]


@pytest.mark.parametrize("option", ["--data", "--speakers-dir", "--held-out"])
def test_recordings_of_another_sample_rate_end_before_there_is_a_run(
    option, mixtures, speakers, tmp_path, capsys
):
    """Of mixtures and of single speakers.

    How many, of which rate, one of them and the option that takes them.
    """
    slow = tmp_path / "slow"
    for path in (speakers if option == "--speakers-dir" else mixtures).rglob("*.wav"):
        write_wav(
            slow / path.relative_to(path.parents[1 if option != "--speakers-dir" else 2]),
            read_wav(path, RATE),
            22050,
        )
    places = {"--data": mixtures, "--held-out": mixtures} | {option: slow}
    if option == "--speakers-dir":
        del places["--data"]
    with pytest.raises(SystemExit) as ended:
        run(
            tmp_path / "run",
            *(each for place in places.items() for each in place),
            "--batch-size",
            2,
        )
    assert ended.value.code == 2
    told = capsys.readouterr().err
    many = 6 if option == "--speakers-dir" else 3
    assert (
        f"{many} of {many} recordings that were looked at have another sample rate than 8000 Hz:"
        f" 22050 Hz ({many})" in told
    )
    assert f"such as {slow}" in told
    assert "\nFix: --sample-rate 22050, or resample all files once" in told
    assert not (tmp_path / "run").exists()


def test_recordings_that_cannot_be_read_end_before_there_is_a_run(
    mixtures, speakers, tmp_path, capsys
):
    """More of them than may be quarantined are told by their headers, with the first of them and
    the way out.
    """
    broken = tmp_path / "broken"
    shutil.copytree(speakers, broken)
    for path in sorted(broken.rglob("*.wav"))[:2]:
        path.write_bytes(b"no sound")
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run", "--speakers-dir", broken, "--held-out", mixtures)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"2 of 6 samples cannot be used, such as: {broken}" in told
    assert "Limit: --quarantine 0.01 sets 1 of these aside.\nFix: " in told
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_it_learns_to_separate_voices_that_it_never_heard(tmp_path):
    """In 220 small steps mixtures of voices that were not trained on come apart by more than 2
    dB.
    """
    options = (
        "--speakers",
        12,
        "--sentences",
        6,
        "--filters",
        32,
        "--bottleneck",
        24,
        "--hidden",
        48,
        "--blocks",
        5,
    )
    options += ("--seconds", 0.4, "--batch-size", 4, "--learning-rate", 6e-3)
    result = run(tmp_path / "run", *options, "--max-steps", 220, "--eval-interval-steps", 220)
    assert result["figures"]["si_snr_improvement_db"] > 2.0
    examples = {path.stem: read_wav(path, RATE) for path in (tmp_path / "run/examples").iterdir()}
    assert set(examples) == {"mixture", "source_1", "source_2", "separated_1", "separated_2"}
    assert np.allclose(examples["source_1"] + examples["source_2"], examples["mixture"], atol=1e-3)
