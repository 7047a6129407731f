"""Every recipe with its defaults, as a new user runs it: how long it takes, and what it has learnt.

How: ``python -m recipes.<name>`` in a folder of its own, one after the other, each with data that
it makes itself; seconds are wall time on this machine with everything that belongs to a run, making
the data included. Figures of learning are those that the recipe writes into ``result.json``, on
data that it was not trained on.

To reach: at most 4 minutes each, and what `_LEARNT` says. `tacotron2` speaks its data with
espeak-ng; where that is not installed only its shipped clips are there, which are too few to learn
from.

``--only pegasus`` runs one of them and keeps what the result file has about the others, and says so
in its notes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.results_file import Figure, Result, read_options

_MOST_SECONDS = 240
_ROOT = Path(__file__).parents[1]
_Figures = Mapping[str, float]
_BASELINES = ("copied", "random")
# The model, and what it stands beside
_WRITERS = ("", *(f"{name}_" for name in (*_BASELINES, "exchanged")))
_LEARNT: dict[str, tuple[str, Callable[[_Figures], bool], tuple[str, ...]]] = {
    "classifier": (
        "at least 90 % right",
        lambda of: of["test_accuracy"] >= 0.9,
        ("test_accuracy",),
    ),
    "gan": (
        "Frechet distance at most twice that of real digits, all ten drawn",
        lambda of: of["frechet"] <= 2 * of["frechet_real"] and of["classes_drawn"] == of["classes"],
        ("frechet", "frechet_real", "frechet_untrained"),
    ),
    "asr": (
        "at most a quarter of the characters wrong",
        lambda of: of["character_error_rate"] <= 0.25,
        ("character_error_rate", "word_error_rate"),
    ),
    "separation": (
        "SI-SNR at least 5 dB better",
        lambda of: of["si_snr_improvement_db"] >= 5,
        ("si_snr_improvement_db",),
    ),
    "tacotron2": (
        "attention diagonal, at least 0.9",
        lambda of: of["diagonality"] >= 0.9,
        ("diagonality", "diagonality_before", "mel_loss", "mel_loss_before"),
    ),
    "pegasus": (
        "ROUGE-L above the first words of the document copied and above random words",
        lambda of: of["rougeL"] > max(of[f"{name}_rougeL"] for name in _BASELINES),
        tuple(f"{name}{rouge}" for name in _WRITERS for rouge in ("rouge1", "rouge2", "rougeL")),
    ),
}
_QUICK = ("classifier",)


def main() -> None:
    """Run all recipes, or one, and write the result."""
    only = _read_only()
    options = read_options("recipes", __doc__ or "")
    result = Result(options=options, parameters={"recipes": len(_LEARNT)})
    for name, (aim, is_learnt, shown) in _LEARNT.items():
        if only is not None and name != only:
            _keep(result, name)
            continue
        if only is None and options.quick and name not in _QUICK:
            continue
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            command = [sys.executable, "-m", f"recipes.{name}", "--run-dir", f"{folder}/run"]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            ended = subprocess.run(
                command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False
            )
            seconds = time.monotonic() - started
            if ended.returncode:
                result.add_count(f"{name}: {aim}", 0, 1, expected=1)
                result.notes.append(f"{name} ended with exit code {ended.returncode}")
                continue
            figures = json.loads(Path(folder, "run", "result.json").read_text())["figures"]
        result.add_samples(
            f"{name}: a run with its defaults", "s", [seconds], at_most=_MOST_SECONDS, digits=1
        )
        result.add_count(f"{name}: {aim}", int(is_learnt(figures)), 1, expected=1)
        for figure in shown:
            result.add_samples(f"{name}: {figure.replace('_', ' ')}", "", [figures[figure]])
    result.write()


def _read_only() -> str | None:
    """Take ``--only`` from the command line, which the benchmarks have in common but for this."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--only", choices=_LEARNT)
    given, sys.argv[1:] = parser.parse_known_args()
    return str(given.only) if given.only is not None else None


def _keep(result: Result, name: str) -> None:
    """Take over what the result file has about a recipe that is not run."""
    if not result.options.out.exists():
        return
    earlier, mark = json.loads(result.options.out.read_text()), f"{name}: "
    result.figures += [
        Figure(**each) for each in earlier["figures"] if each["what"].startswith(mark)
    ]
    result.samples |= {
        what: each for what, each in earlier["samples"].items() if what.startswith(mark)
    }
    notes = [note for note in earlier["notes"] if note.startswith((mark, f"{name} "))]
    commit = str(earlier["commit"]["commit"])[:12]
    result.notes += notes or [f"{name}: kept from {earlier['date']}, commit {commit}"]


if __name__ == "__main__":
    main()
