"""Run hostile inputs for some minutes: ``python -m evals.fuzz --minutes 60 --seed 1``; a file says what was found.

An input comes from its seed, target and number alone: ``--only tree --first 812 --count 1 --show`` makes it again.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from evals.fuzz.child import MOST_BYTES, bound_memory, run
from evals.fuzz.targets import CLEAR, TARGETS, make_base, make_input


def fuzz(seed: int, names: Sequence[str], *, seconds: float, first: int = 0, count: int = 1 << 60) -> dict[str, Any]:
    """Return how many inputs of each target came to what, and the findings, one of each place."""
    until, used, most = time.monotonic() + seconds, 0.0, 0
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in names}
    findings: dict[str, dict[str, Any]] = {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as place:
        base, folder = Path(place) / "base", Path(place) / "input"
        base.mkdir()
        made = run(base, lambda: make_base(base), allowed=())  # in a child: whoever forks has computed nothing
        if made["kind"] != "fine: made":
            raise SystemExit(f"what is to be changed cannot be made: {made}")
        for number, name in ((each, name) for each in range(first, first + count) for name in names):
            if time.monotonic() > until:
                break
            folder.mkdir()
            work = make_input(base, folder, name, Random(f"{seed} {name} {number}"))
            result = run(folder, work, allowed=CLEAR[name])
            shutil.rmtree(folder)
            counts[name][result["kind"]] += 1
            used, most = used + result["cpu"], max(most, result["resident"])
            if not result["kind"].startswith(("fine", "refused")):
                place_of = name + "".join(result["text"].split("\n")[-6:])[-300:]
                known = findings.setdefault(place_of, {**result, "target": name, "number": number, "times": 0})
                known["times"] += 1
    return {
        "seed": seed, "inputs": sum(each.total() for each in counts.values()), "cpu_minutes": round(used / 60, 2),
        "most_resident_bytes": most, "counts": {name: dict(sorted(each.items())) for name, each in counts.items()},
        "findings": list(findings.values()),
    }  # fmt: skip


def main() -> None:
    """Parse the options, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 60)
    parser.add_argument("--show", action="store_true", help="print the findings")
    parser.add_argument("--out", type=Path, default=Path("fuzz.json"))
    given = parser.parse_args()
    bound_memory(2 * MOST_BYTES)  # of this process too, which makes the inputs
    found = fuzz(given.seed, given.only, seconds=60 * given.minutes, first=given.first, count=given.count)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.show:
        print(json.dumps(found["findings"], indent=1).replace("\\n", "\n"))
    print(
        f"{found['inputs']} inputs, {found['cpu_minutes']} CPU minutes, {len(found['findings'])} places with findings"
    )


if __name__ == "__main__":
    main()
