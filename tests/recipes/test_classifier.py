"""The classifier: every fault that can be switched on is named, the healthy run is left in
peace, files are read.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from recipes.classifier.faults import CUT_OFF, FAULTS, NOT_A_NUMBER
from recipes.classifier.images import DataError, Folder, find_source, write_digits, write_idx
from recipes.classifier.train import main

from holdfast.core.events.event import Event
from holdfast.explain.collecting import collect
from holdfast.explain.judging import judge
from holdfast.explain.verdict import Verdict
from holdfast.loader.quarantine import FILE_NAME, read_ledger
from holdfast.recorder.reader import read_events

ROOT = Path(__file__).parents[2]
# Enough for the rule that names each: contracts in the first steps, windows over the run as a
# whole.
STEPS = {
    "unscaled-inputs": 220,
    "lr-too-high": 120,
    "lr-too-low": 120,
    "momentum-too-high": 220,
    "exploding-gradients": 220,
    "shuffled-labels": 220,
    "vanishing-gradients": 220,
}
OF_LOADING = ("dead-worker", "stopped-worker", "slow-worker")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a quarter of scikit-learn's digits: 360 to train on, 90 to test with."""
    whole = tmp_path_factory.mktemp("digits") / "whole"
    write_digits(whole)
    few = whole.with_name("few")
    for part in ("train", "test"):
        for picture in sorted(whole.glob(f"{part}/*/*.png"), key=lambda path: path.name)[::4]:
            place = few / picture.relative_to(whole)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, place)
    return few


class Ended:
    """What came of a run of the recipe: its result, its events, and the verdict on it."""

    def __init__(self, run_dir: Path, data: Path, *options: object) -> None:
        small = (
            "--batch-size",
            16,
            "--width",
            8,
            "--warmup-steps",
            20,
            "--data-dir",
            data,
            "--run-dir",
            run_dir,
        )
        self.result: dict[str, Any] = {}
        self.code: object = 0
        try:
            self.result = main([str(each) for each in (*small, *options)])
        except SystemExit as error:
            self.code = error.code
        self.run_dir = run_dir

    def events(self, *kinds: str) -> list[Event]:
        return [
            event
            for event in read_events(self.run_dir / "recorder" / "rank0")
            if event.kind in kinds
        ]

    def verdict(self) -> Verdict:
        return judge(collect(self.run_dir))


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the weights of a run that nothing happened to."""
    weights: str = Ended(tmp_path_factory.mktemp("undisturbed"), digits, "--max-steps", 60).result[
        "weights"
    ]
    return weights


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.usefixtures("unchecked_splits")  # the run that nothing happened to has the forks
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named(fault, digits, undisturbed, tmp_path):
    """What was switched on stands among the findings or events of the run, and in what `holdfast
    explain` tells.
    """
    named_by = FAULTS[fault].named_by
    ended = Ended(tmp_path / "run", digits, "--fault", fault, "--max-steps", STEPS.get(fault, 60))
    found = {event.data["rule"] for event in ended.events("finding", "preflight")}
    kinds = {event.kind for event in ended.events(named_by)}
    assert named_by in json.loads((ended.run_dir / "result.json").read_text())["figures"]["found"]
    if fault == "shuffled-labels":  # that nothing is learnt is only said on request
        assert named_by not in found
        return
    assert named_by in found | kinds
    told = json.dumps(ended.verdict().as_json())
    said = {
        "loader_healed": "replaced the loader's workers",
        "sample_quarantined": "quarantined a sample",
        "nonfinite_origin": "NaN in the batch",
    }
    assert said.get(named_by, f"[{named_by}]") in told
    quoted = [
        each.text for each in ended.verdict().evidence if each.source.startswith("guard, step")
    ]
    assert named_by in said or named_by in quoted[0], "what is named first is the cause"
    if fault == "corrupt-samples":  # with its file
        ledger, paths = read_ledger(ended.run_dir / FILE_NAME), find_source(digits, train=True)
        assert sorted(ledger) == list(CUT_OFF)
        assert all(paths.name(index) in entry.evidence for index, entry in ledger.items())
    if fault == "nan-inputs":
        named = {
            index
            for event in ended.events("nonfinite_origin")
            for index in event.data["dataset_indices"]
        }
        assert named == set(NOT_A_NUMBER)
    if fault in OF_LOADING:
        assert ended.result["weights"] == undisturbed, "and it is healed, bit for bit"


@pytest.mark.slow
def test_the_healthy_run_is_left_in_peace(digits, tmp_path):
    """Beyond the first window of the diagnosis nothing is found, skipped or healed, and digits
    are learnt.
    """
    ended = Ended(tmp_path / "run", digits, "--max-steps", 420)
    unusual = ("finding", "preflight", "skip_step", "loader_healed", "sample_quarantined")
    assert ended.events(*unusual) == []
    assert ended.result["figures"]["found"] == []
    assert ended.result["figures"]["test_accuracy"] > 0.75
    assert ended.verdict().title == "ended well"
    assert "What happened" in (ended.run_dir / "report.html").read_text()


@pytest.mark.slow
def test_schedules_count_real_steps_over_skips_and_resumes(digits, tmp_path):
    """The warm-up passes over a skipped step, the plateau reacts to validations, and both go on
    after a restart.
    """
    options = ("--fault", "nan-inputs", "--validate-steps", 3, "--patience", 0, "--lr", 0.4)
    early = Ended(tmp_path / "cut", digits, *options, "--max-steps", 10)
    begun = early.result
    whole = Ended(tmp_path / "whole", digits, *options, "--max-steps", 30)
    rest = Ended(tmp_path / "cut", digits, *options, "--max-steps", 30, "--resume")
    assert whole.result["statistics"]["skipped_steps"] > 0
    reductions = [
        event.global_step
        for event in whole.events("validated")
        if event.data["learning_rate_changed_by"]
    ]
    assert reductions, "the plateau was met"
    warm = 0.4 * (0.1 + 0.9 * 10 / 20) * 0.3 ** sum(step <= 10 for step in reductions)
    assert begun["figures"]["learning_rate"] == pytest.approx(warm)
    assert whole.result["figures"]["learning_rate"] == pytest.approx(0.4 * 0.3 ** len(reductions))
    for name in ("weights", "figures"):
        assert rest.result[name] == whole.result[name]
    assert rest.result["statistics"]["resumes"] == 1


def test_idx_files_hold_the_same_images_as_folders(digits, tmp_path):
    """Written as IDX, with and without gzip and under both usual names, all is as in the folder."""
    for train, prefix in ((True, "train"), (False, "t10k")):
        folder = find_source(digits, train=train)
        images = np.stack(
            [folder.decode(folder.read(index)) for index in range(len(folder.labels))]
        )
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{prefix}-labels.idx1-ubyte", np.array(folder.labels))
        found = find_source(tmp_path, train=train)
        assert list(found.labels) == list(folder.labels)
        assert all(
            np.array_equal(found.decode(found.read(index)), images[index])
            for index in range(len(images))
        )


def _cut_off(place: Path) -> None:
    whole = (place / "train-images-idx3-ubyte").read_bytes()
    (place / "train-images-idx3-ubyte").write_bytes(whole[:-1])


DAMAGE = {
    "nothing at all": (lambda place: shutil.rmtree(place) or place.mkdir(), "holds neither"),
    "cut off": (_cut_off, "it is cut off"),
    "no IDX file": (
        lambda place: (place / "train-images-idx3-ubyte").write_text("<html>404"),
        "is no IDX file",
    ),
    "labels of another set": (
        lambda place: write_idx(place / "train-labels-idx1-ubyte", np.zeros(3)),
        "4 images and",
    ),
    "a damaged gzip": (
        lambda place: (
            (place / "train-images-idx3-ubyte").unlink(),
            (place / "train-images-idx3-ubyte.gz").write_bytes(
                gzip.compress(b"x" * 99)[:10] + bytes([255] * 40)
            ),
        ),
        "cannot be read",
    ),
    "no image": (
        lambda place: (
            write_idx(place / "train-images-idx3-ubyte", np.zeros((0, 8, 8))),
            write_idx(place / "train-labels-idx1-ubyte", np.zeros(0)),
        ),
        "no pixel at all",
    ),
    "pictures of one class": (
        lambda place: (place / "train" / "0").mkdir(parents=True),
        "fewer than two classes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_data_that_cannot_be_used_is_refused_by_name(damage, tmp_path, capsys):
    """The message names the file and what to do, and the process ends with code 2 before
    anything is trained.
    """
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", np.zeros((4, 8, 8)))
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", np.arange(4))
    hurt, said = DAMAGE[damage]
    hurt(tmp_path)
    with pytest.raises(DataError, match=said):
        find_source(tmp_path, train=True)
    ended = Ended(tmp_path / "run", tmp_path, "--max-steps", 1)
    assert ended.code == 2
    assert "Fix: " in capsys.readouterr().err


def picture(place: Path, shade: int, size: int = 8) -> Path:
    """Write a picture of one shade, with a gradient across it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    values = (np.arange(size * size).reshape(size, size) + shade) % 256
    Image.fromarray(values.astype(np.uint8)).save(place)
    return place


def of_sizes(part: Path, sizes: dict[int, int]) -> None:
    """Write pictures of two classes: of each size so many, the first size first."""
    for number, size in enumerate(size for size, many in sizes.items() for _ in range(many)):
        picture(part / ("cat", "dog")[number % 2] / f"{number:02d}.png", number, size)


@pytest.mark.parametrize("part", ["train", "test"])
def test_pictures_of_several_sizes_are_refused_at_once(part, tmp_path, capsys):
    """By their headers alone: how many of each size, the size of most, and what to do.

    No run directory is made.
    """
    for each in ("train", "test"):
        of_sizes(tmp_path / each, {8: 12})
    shutil.rmtree(tmp_path / part)
    of_sizes(tmp_path / part, {11: 2, 8: 5, 9: 1})
    for path in (tmp_path / part).glob("*/*.png"):
        path.write_bytes(path.read_bytes()[:50])  # its header and no more
    assert Ended(tmp_path / "run", tmp_path, "--batch-size", 4).code == 2
    told = capsys.readouterr().err
    assert "3 of 8 images have another size than 8x8 (width x height), such as " in told
    assert (
        "00.png, which has shape (11, 11). There are 5 of 8x8, 2 of 11x11, 1 of 9x9.\nLimit: all"
        " are of" in told
    )
    assert "--quarantine 0.001 sets 1 of these aside.\nFix: resize them" in told
    assert "mogrify -resize '8x8!'" in told
    assert not (tmp_path / "run").exists()


def test_more_unreadable_pictures_than_may_be_quarantined_are_refused_at_once(tmp_path, capsys):
    """Their headers tell it, so that no run begins that cannot end."""
    for part in ("train", "test"):
        of_sizes(tmp_path / part, {8: 12})
    for path in sorted(tmp_path.glob("train/*/*.png"))[:2]:
        path.write_bytes(b"no picture")
    assert Ended(tmp_path / "run", tmp_path, "--batch-size", 4).code == 2
    told = capsys.readouterr().err
    assert (
        f"2 of 12 samples cannot be used, such as: {tmp_path / 'train/cat/00.png'} cannot be"
        " read\nLimit: " in told
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp", "gif"])
def test_a_damaged_picture_is_read_or_refused_and_nothing_else(kind, tmp_path):
    """With any byte changed or the end cut off, whatever Pillow raises is a ValueError, which
    sets it aside.
    """
    whole = picture(tmp_path / "cat" / f"1.{kind}", 7).read_bytes()
    picture(tmp_path / "dog" / f"1.{kind}", 9)
    source = Folder.of(tmp_path)
    refused = 0
    for place in range(len(whole)):
        for damaged in (
            whole[:place],
            bytes([*whole[:place], whole[place] ^ 0xFF, *whole[place + 1 :]]),
        ):
            try:
                assert source.decode(damaged).ndim == 2
            except ValueError:
                refused += 1
    assert refused > len(whole)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch-size", 0),
        ("validate-steps", 0),
        ("width", 0),
        ("depth", -1),
        ("lr", 0),
        ("momentum", 1),
        ("momentum", -0.1),
        ("weight-decay", -1),
        ("patience", -1),
        ("warmup-steps", -1),
        ("quarantine", -1),
    ],
)
def test_sizes_that_make_no_training_are_refused(option, value, tmp_path, capsys):
    """Each is named with what is needed, with code 2, before a run directory is made."""
    assert Ended(tmp_path / "run", tmp_path, f"--{option}", value).code == 2
    assert re.search(rf"--{option} {value}(\.0)?; .* is needed\nFix: ", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_the_readme_tells_of_every_fault():
    """Each fault stands in the recipe's page with the rule or event that names it."""
    page = (ROOT / "recipes" / "classifier" / "README.md").read_text()
    for name, fault in FAULTS.items():
        assert any(f"`{name}`" in line and fault.named_by in line for line in page.splitlines()), (
            name
        )
