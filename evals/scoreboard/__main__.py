"""The same campaign over one training in each framework, as its documentation recommends it, and
with holdfast.

``train.py`` trains the same classifier in each. It is put to `holdfast chaos` with the same seed
and all kinds of faults, forked from a process that has torch and the framework loaded. What cannot
be imported is left out, and the result says so; it is written after each campaign. ``make
scoreboard`` gets what it needs.

    python -m evals.scoreboard [--only WORD,WORD] [--seed 1] [--quick]
"""

import argparse
import importlib.metadata
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from benchmarks.results_file import Result, read_options, without_paths

from evals.chaos.__main__ import prepare, start
from holdfast.chaos import trials
from holdfast.chaos.campaign import Campaign
from holdfast.chaos.fault_plans import KINDS

_ROOT = Path(__file__).parents[2]
_LOADED = ("torch", "numpy", "torch._dynamo", "evals.scoreboard.savers")
# Name, function of train.py, distribution, what is loaded beside torch, and ways to run it.
ENTRIES = (
    (
        "PyTorch",
        "plain",
        "torch",
        ("torch.distributed.checkpoint", "holdfast.guard.guard"),
        {
            "": "alone",
            "careful": "by hand with care",
            "dcp": "as torchtitan saves",
            "holdfast": "with holdfast",
        },
    ),
    (
        "HF Trainer",
        "trainer",
        "transformers",
        ("transformers.trainer", "holdfast.integrations.transformers"),
        {},
    ),
    (
        "Accelerate",
        "accelerate",
        "accelerate",
        ("accelerate", "holdfast.integrations.accelerate"),
        {},
    ),
    (
        "Lightning",
        "lightning",
        "lightning",
        ("lightning.pytorch", "holdfast.integrations.lightning"),
        {},
    ),
    (
        "Composer",
        "composer",
        "mosaicml",
        ("composer",),
        {"": "alone", "holdfast": "with the loader of holdfast"},
    ),
    (
        "SpeechBrain",
        "speechbrain",
        "speechbrain",
        ("speechbrain", "holdfast.integrations.speechbrain"),
        {},
    ),
)


def tried(function, distribution, loaded, way, seed, kinds):
    """Put one training to the test.

    Return the version of its framework, and what is kept of each trial.
    """
    version = importlib.metadata.version(distribution).partition("+")[0]
    prepare()
    trials.subprocess.Popen = partial(start, loaded=(*_LOADED, *loaded))
    command = [sys.executable, str(Path(__file__).with_name("train.py")), function, way]
    with tempfile.TemporaryDirectory() as folder:
        report = Campaign(
            command, origin=Path(folder), only=kinds, seed=seed, restarts=2, budget_seconds=1e6
        ).run()
    assert report.unsteady is None, f"two undisturbed runs differ: {report.unsteady}"
    assert report.steps == 30, f"the observer has seen {report.steps} steps of 30"
    same = ("kind", "fault", "result", "tried", "lost", "passed", "attempts")
    rows = [
        {name: getattr(row, name) for name in same}
        | {"detail": without_paths(row.detail), "seconds_lost": round(row.seconds_lost, 1)}
        | {"steps_again": row.comparison.get("steps_again", 0)}
        for row in report.rows
    ]
    return version, rows


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", default="", type=lambda words: words.lower())
    parser.add_argument("--seed", default=1, type=int)
    given, sys.argv[1:] = parser.parse_known_args()
    options = read_options("scoreboard", __doc__ or "")
    # One process
    kinds = ["first", "save"] if options.quick else [kind for kind in KINDS if kind != "rank"]
    result = Result(options=options, parameters={"seed": given.seed, "kinds": kinds, "restarts": 2})
    os.environ["PYTHONPATH"] = f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"  # of what is forked
    running = {}
    with ProcessPoolExecutor(4) as pool:
        for name, function, distribution, loaded, ways in ENTRIES:
            for way, words in (ways or {"": "alone", "holdfast": "with holdfast"}).items():
                if any(word in f"{name} {words}".lower() for word in given.only.split(",")):
                    future = pool.submit(
                        tried, function, distribution, loaded, way, given.seed, kinds
                    )
                    running[future] = name, words
        for done in as_completed(running):
            name, words = running[done]
            try:
                version, rows = done.result()
            except Exception as error:  # noqa: BLE001 - one framework must not end the others
                result.notes.append(f"{name}, {words}: left out: {without_paths(str(error))}")
                print(result.notes[-1], flush=True)
                continue
            title = f"{name} {version}, {words}"
            met = [row for row in rows if row["tried"]]
            for what, count in (
                ("that it survives", sum(not row["lost"] for row in met)),
                ("after which it is the same training", sum(row["passed"] for row in met)),
            ):
                expected = len(met) if title.endswith("with holdfast") else None
                result.add_count(f"{title}: faults {what}", count, len(met), expected=expected)
            result.samples[title] = rows
            result.write()


if __name__ == "__main__":
    main()
