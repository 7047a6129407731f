"""Images of a run: the file is the image, what cannot be one is refused, and little is kept."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.guard.guarded import events

import holdfast
from holdfast.guard import images
from holdfast.report.page.images import png_size


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image)


@pytest.fixture
def guard(tmp_path):
    model = torch.nn.Linear(2, 1)
    with holdfast.Guard(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)
    ) as guard:
        yield guard


def kept(tmp_path, tag="grid"):
    return sorted(int(path.stem) for path in (tmp_path / "images" / tag).iterdir())


def refusal(guard, tag, image) -> str:
    with pytest.raises(holdfast.PolicyError) as error:
        guard.add_image(tag, image)
    assert error.value.rule == "H105"
    return str(error.value)


def test_the_file_is_the_image_and_the_event_names_it(guard, tmp_path):
    """Grey and RGB, uint8, bool, float and bfloat16, arrays and tensors with gradients come back
    level by level.
    """
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3) * 50
    colours = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    for number, (given, expected) in enumerate(
        (
            (grey, grey),
            (grey[:, :, None], grey),
            (colours, colours),
            (colours[::-1, ::-1], colours[::-1, ::-1]),
            (grey > 100, (grey > 100) * np.uint8(255)),
            (torch.tensor(colours / 255.0, requires_grad=True), colours),
            (
                torch.tensor([[0.0, 0.5], [1.0, 0.25]], dtype=torch.bfloat16),
                np.array([[0, 128], [255, 64]]),
            ),
            ([[0.0, 1.0]], np.array([[0, 255]])),
        )
    ):
        guard.add_image(f"grid-{number}", given)
        assert np.array_equal(pixels_of(tmp_path / f"images/grid-{number}/0.png"), expected)
    event, *_ = events(guard, "image_added")
    odd = {"nonfinite": 0, "outside_0_to_1": 0}
    assert event.data == {"tag": "grid-0", "path": "images/grid-0/0.png", **odd}


def test_bytes_of_a_file_are_refused_with_the_way_to_decode_them(guard):
    """An image is what numpy makes an array of."""
    assert "PIL.Image.open" in refusal(guard, "a", b"\x89PNG")


def test_what_cannot_be_an_image_is_refused_with_the_fix(guard):
    """A wrong tag, shape, size or type is an error that names it."""
    image = np.zeros((4, 4))
    for tag in ("", "../x", "a/b", ".hidden", "x" * 65, 3, "a\n"):
        assert repr(tag) in refusal(guard, tag, image)
    assert "permute(1, 2, 0)" in refusal(guard, "a", torch.zeros(3, 8, 8))
    assert "shape (4,)" in refusal(guard, "a", np.zeros(4))
    assert "shape (2, 0)" in refusal(guard, "a", np.zeros((2, 0)))
    assert "scale it down" in refusal(guard, "a", np.zeros((2049, 2049), np.uint8))
    assert "int64" in refusal(guard, "a", np.zeros((2, 2), np.int64))
    assert "complex64" in refusal(guard, "a", torch.zeros(2, 2, dtype=torch.complex64))
    assert "list" in refusal(guard, "a", [[1.0], [1.0, 2.0]])


def test_without_pillow_the_error_names_it(guard, tmp_path, monkeypatch):
    """H742 says what to install, and nothing was written."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(holdfast.PolicyError, match="pip install pillow") as error:
        guard.add_image("grid", np.zeros((2, 2)))
    assert error.value.rule == "H742"
    assert not (tmp_path / "images").exists()


def test_the_largest_image_that_does_not_compress_can_be_read_back(guard, tmp_path):
    """PNG adds a little to noise; the page still accepts what a guard has written."""
    noise = np.random.default_rng(0).integers(0, 256, (8192, 512), dtype=np.uint8)

    guard.add_image("noise", noise)

    assert png_size((tmp_path / "images/noise/0.png").read_bytes()) == (512, 8192)


def test_the_newest_sixteen_of_a_tag_are_kept_also_after_going_back(guard, tmp_path):
    """What is dropped is what was written longest ago, so that a run that went back keeps its
    new images.
    """
    for step in range(100, 120):
        guard._record.move_to_step(step)
        guard.add_image("grid", np.zeros((2, 2)))
    assert kept(tmp_path) == list(range(104, 120))
    (tmp_path / "images/grid/.tmp-3.png-77").write_bytes(b"torn")
    for step in range(50, 60):
        guard._record.move_to_step(step)
        guard.add_image("grid", np.zeros((2, 2)))
    assert kept(tmp_path) == [*range(50, 60), *range(114, 120)]


def test_a_full_disk_and_a_tag_too_many_leave_training_alone(guard, tmp_path, monkeypatch):
    """Where an image cannot be kept an event says so, and nothing is raised."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(images, "replace_file", full)
        guard.add_image("a", np.zeros((2, 2)))
    monkeypatch.setattr(images, "MOST_TAGS", 1)
    guard.add_image("b", np.zeros((2, 2)))
    guard.add_image("a", np.zeros((2, 2)))
    said = [event.data["reason"] for event in guard.events() if event.kind == "image_left_out"]
    assert said == ["No space left on device", "1 tags have images already"]
    assert kept(tmp_path, "a") == [0]
