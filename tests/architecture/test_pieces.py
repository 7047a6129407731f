"""Results in pieces add up, and a slope is told from noise."""

from __future__ import annotations

import json

import numpy as np
from evals.fuzz.__main__ import count_pieces
from evals.pieces import begin_piece, read_pieces, write_piece
from evals.soak.__main__ import slope_per_hour


def test_pieces_add_up_and_one_that_grows_is_replaced(tmp_path):
    """Two runs with one finding each, one of them mended: the figures are of both."""
    out = tmp_path / "fuzz.json"
    for minutes, mended in ((20.0, {}), (45.0, {"mended": "abc"})):
        piece = begin_piece(
            seconds=1.0, inputs=100, cpu_minutes=1.0, most_resident_bytes=1, findings=[]
        )
        write_piece(out, piece, count_pieces)
        write_piece(
            out,
            piece | {"cpu_minutes": minutes, "findings": [{"times": 3, **mended}]},
            count_pieces,
        )
    assert [each["cpu_minutes"] for each in read_pieces(out)] == [20.0, 45.0]
    figures = {each["what"]: each["value"] for each in json.loads(out.read_text())["figures"]}
    assert figures["processor time of hostile inputs, all pieces"] == 65.0
    assert figures["places with findings that are left, of all found"] == 1


def test_a_slope_is_told_from_noise():
    """Half an hour of samples.

    12 an hour is found, and nothing is found in noise with one jump at its start.
    """
    seconds, noise = np.arange(0, 1800, 5.0), np.random.default_rng(1).normal(300, 1, 360)
    noise[:20] += 50
    _, low, high = slope_per_hour(seconds, noise)
    assert low < 0 < high < 4
    slope, low, high = slope_per_hour(seconds, noise + seconds / 300)
    assert 8 < low < slope < high < 16
