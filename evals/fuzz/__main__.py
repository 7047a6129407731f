"""Run hostile inputs for some minutes.

``python -m evals.fuzz --minutes 60 --seed 1`` adds to the result file.

A piece is written each minute, and when the run is asked to end. Findings of earlier pieces are
made again first: one that is none any more is *mended*. An input comes from its seed, target and
number alone: ``--only tree --first 812 --count 1 --show`` makes it again, and writes nothing.

To reach: an hour of processor time in all, and no finding that is left.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from benchmarks.results_file import Result, without_paths

from evals.fuzz.child import MOST_BYTES, bound_memory, run
from evals.fuzz.targets import CLEAR, TARGETS, import_modules, make_base, make_input
from evals.pieces import asked_to_end, begin_piece, read_pieces, write_piece


def results(
    seed: int, inputs: Iterator[tuple[str, int]]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Make inputs by target and number, and give what came of each, and whether it is a finding."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as place:
        base, folder = Path(place) / "base", Path(place) / "input"
        base.mkdir()
        # In a child: whoever forks has computed nothing
        made = run(base, lambda: make_base(base), allowed=())
        if made["kind"] != "fine: made":
            raise SystemExit(f"what is to be changed cannot be made: {made}")
        import_modules(base)
        for name, number in inputs:
            folder.mkdir()
            work = make_input(base, folder, name, Random(f"{seed} {name} {number}"))
            result = run(folder, work, allowed=CLEAR[name])
            shutil.rmtree(folder)
            result["text"] = without_paths(result["text"], 3000)
            yield (
                name,
                number,
                result | {"found": not result["kind"].startswith(("fine", "refused"))},
            )


def fuzz(
    seed: int,
    names: Sequence[str],
    *,
    seconds: float,
    first: int = 0,
    count: int = 1 << 60,
    ends: Callable[[], bool] = lambda: False,
    write: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Return how many inputs of each target came to what, and one finding of each place.

    `write` gets it too.
    """
    began = written = time.monotonic()
    piece = begin_piece(seed=seed, first=first, inputs=0, cpu_minutes=0.0, most_resident_bytes=0)
    counts: dict[str, dict[str, int]] = {name: {} for name in names}
    findings: dict[str, dict[str, Any]] = {}
    for name, number, result in results(
        seed, ((name, n) for n in range(first, first + count) for name in names)
    ):
        if ends():
            break  # the input that was running may have been asked to end too
        counts[name][result["kind"]] = counts[name].get(result["kind"], 0) + 1
        piece["inputs"] += 1
        piece["cpu_minutes"] = round(piece["cpu_minutes"] + result["cpu"] / 60, 5)
        piece["most_resident_bytes"] = max(piece["most_resident_bytes"], result["resident"])
        if result["found"]:
            place_of = name + "".join(result["text"].split("\n")[-6:])[-300:]
            known = findings.setdefault(
                place_of, {**result, "target": name, "number": number, "times": 0}
            )
            known["times"] += 1
        piece |= {
            "seconds": time.monotonic() - began,
            "counts": counts,
            "findings": list(findings.values()),
        }
        if time.monotonic() - written > 60:
            written = time.monotonic()
            write(piece)
        if piece["seconds"] > seconds:
            break
    write(piece)
    return piece


def make_again(out: Path) -> None:
    """Make the findings of earlier pieces again, and note which are mended."""
    for piece in read_pieces(out):
        left = {each["number"]: each for each in piece["findings"] if "mended" not in each}
        for _, number, result in (
            results(piece["seed"], ((each["target"], n) for n, each in left.items()))
            if left
            else ()
        ):
            if not result["found"]:
                left[number]["mended"] = begin_piece()["commit"]
                write_piece(out, piece, count_pieces)


def count_pieces(result: Result, pieces: list[dict[str, Any]]) -> None:
    """Add the figures of all pieces."""
    findings = [each for piece in pieces for each in piece["findings"]]
    minutes = round(sum(piece["cpu_minutes"] for piece in pieces), 1)
    result.add_samples(
        "processor time of hostile inputs, all pieces", "minutes", [minutes], at_least=60
    )
    left = sum("mended" not in each for each in findings)
    result.add_count(
        "places with findings that are left, of all found", left, len(findings), expected=0
    )
    inputs = sum(piece["inputs"] for piece in pieces)
    result.add_count(
        "inputs with a finding, mended ones too", sum(each["times"] for each in findings), inputs
    )
    most = round(max(piece["most_resident_bytes"] for piece in pieces) / 2**20)
    result.add_samples(
        "largest resident memory of an input", "MiB", [most], at_most=MOST_BYTES / 2**20
    )


def main() -> None:
    """Parse the options, and add a piece to the result file, or show findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 60)
    parser.add_argument("--show", action="store_true", help="print the findings, and write nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fuzz.json"))
    given = parser.parse_args()
    bound_memory(2 * MOST_BYTES)  # of this process too, which makes the inputs
    if not given.show:
        make_again(given.out)
    found = fuzz(
        given.seed,
        given.only,
        seconds=60 * given.minutes,
        first=given.first,
        count=given.count,
        ends=asked_to_end(),
        write=lambda piece: given.show or write_piece(given.out, piece, count_pieces),
    )
    if given.show:
        print(json.dumps(found["findings"], indent=1).replace("\\n", "\n"))
    print(
        f"{found['inputs']} inputs, {found['cpu_minutes']:.2f} CPU minutes,"
        f" {len(found['findings'])} findings"
    )


if __name__ == "__main__":
    main()
