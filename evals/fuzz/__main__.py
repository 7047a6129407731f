"""Run hostile inputs for some minutes: ``python -m evals.fuzz --minutes 60 --seed 1`` adds to the result file.

A piece is written each minute, and when the run is asked to end. Findings of earlier pieces are made again first:
one that is none any more is *mended*. An input comes from its seed, target and number alone:
``--only tree --first 812 --count 1 --show`` makes it again, and writes nothing.

To reach: an hour of processor time in all, and no finding that is left.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from benchmarks.results_file import Result

from evals.fuzz.child import MOST_BYTES, bound_memory, run
from evals.fuzz.targets import CLEAR, TARGETS, import_modules, make_base, make_input
from evals.pieces import asked_to_end, begin_piece, read_pieces, write_piece

OUT = Path("benchmarks/results/fuzz.json")
Input = tuple[int, str, int]
"""Seed, target and number."""


def results(inputs: Iterator[Input]) -> Iterator[tuple[Input, dict[str, Any]]]:
    """Make each input, and give what came of it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as place:
        base, folder = Path(place) / "base", Path(place) / "input"
        base.mkdir()
        made = run(base, lambda: make_base(base), allowed=())  # in a child: whoever forks has computed nothing
        if made["kind"] != "fine: made":
            raise SystemExit(f"what is to be changed cannot be made: {made}")
        import_modules(base)
        for seed, name, number in inputs:
            folder.mkdir()
            work = make_input(base, folder, name, Random(f"{seed} {name} {number}"))
            result = run(folder, work, allowed=CLEAR[name])
            shutil.rmtree(folder)
            yield (seed, name, number), result


def is_finding(result: dict[str, Any]) -> bool:
    """Return whether something came of an input that must not."""
    return not result["kind"].startswith(("fine", "refused"))


def fuzz(
    seed: int, names: Sequence[str], *, seconds: float, first: int = 0, count: int = 1 << 60,
    ends: Callable[[], bool] = lambda: False, write: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Return how many inputs of each target came to what, and the findings, one of each place.

    Args:
        seed: Of the inputs.
        names: Of the targets.
        seconds: How long.
        first: Number of the first input of each target.
        count: How many inputs of each target at most.
        ends: Whether to end before.
        write: Gets what was found up to now, each minute.
    """
    began = written = time.monotonic()
    used, most = 0.0, 0
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in names}
    findings: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = begin_piece(seed=seed, first=first)

    def found() -> dict[str, Any]:
        return about | {
            "seconds": round(time.monotonic() - began, 1), "inputs": sum(each.total() for each in counts.values()),
            "cpu_minutes": round(used / 60, 2), "most_resident_bytes": most,
            "counts": {name: dict(sorted(each.items())) for name, each in counts.items()},
            "findings": list(findings.values()),
        }  # fmt: skip

    inputs = ((seed, name, number) for number in range(first, first + count) for name in names)
    for (_, name, number), result in results(inputs):
        if ends():
            break  # the input that was running may have been asked to end too
        counts[name][result["kind"]] += 1
        used, most = used + result["cpu"], max(most, result["resident"])
        if is_finding(result):
            place_of = name + "".join(result["text"].split("\n")[-6:])[-300:]
            known = findings.setdefault(place_of, {**result, "target": name, "number": number, "times": 0})
            known["times"] += 1
        if time.monotonic() - written > 60:
            written = time.monotonic()
            write(found())
        if time.monotonic() - began > seconds:
            break
    return found()


def make_again(out: Path, ends: Callable[[], bool]) -> None:
    """Make the findings of earlier pieces again, and note which are mended."""
    for piece in read_pieces(out):
        open_ones = {each["number"]: each for each in piece["findings"] if "mended" not in each}
        inputs: Iterator[Input] = iter([(piece["seed"], each["target"], n) for n, each in open_ones.items()])
        for (_, _, number), result in results(inputs) if open_ones else ():
            if not is_finding(result) and not ends():
                open_ones[number]["mended"] = begin_piece()["commit"]
                write_piece(out, piece, count_pieces)


def count_pieces(result: Result, pieces: list[dict[str, Any]]) -> None:
    """Add the figures of all pieces."""
    findings = [each for piece in pieces for each in piece["findings"]]
    minutes = sum(piece["cpu_minutes"] for piece in pieces)
    result.add_samples("processor time of hostile inputs, all pieces", "minutes", [round(minutes, 1)], at_least=60)
    left = sum("mended" not in each for each in findings)
    result.add_count("places with findings that are left, of all found", left, len(findings), expected=0)
    inputs = sum(piece["inputs"] for piece in pieces)
    result.add_count("inputs with a finding, mended ones too", sum(each["times"] for each in findings), inputs)
    most = max(piece["most_resident_bytes"] for piece in pieces) / 2**20
    result.add_samples("largest resident memory of an input", "MiB", [round(most)], at_most=MOST_BYTES / 2**20)


def main() -> None:
    """Parse the options, and add a piece to the result file, or show findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 60)
    parser.add_argument("--show", action="store_true", help="print the findings, and write nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    bound_memory(2 * MOST_BYTES)  # of this process too, which makes the inputs
    ends = asked_to_end()

    def write(piece: dict[str, Any]) -> None:
        if not given.show:
            write_piece(given.out, piece, count_pieces)

    if not given.show:
        make_again(given.out, ends)
    found = fuzz(
        given.seed,
        given.only,
        seconds=60 * given.minutes,
        first=given.first,
        count=given.count,
        ends=ends,
        write=write,
    )
    write(found)
    if given.show:
        print(json.dumps(found["findings"], indent=1).replace("\\n", "\n"))
    print(
        f"{found['inputs']} inputs, {found['cpu_minutes']} CPU minutes, {len(found['findings'])} places with findings"
    )


if __name__ == "__main__":
    main()
