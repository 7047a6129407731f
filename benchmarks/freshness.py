"""Which result files still speak about the code as it is: each names the sources that it measures, by a digest.

    python -m benchmarks.freshness                            # what is stale
    python -m benchmarks.freshness --harmless "why" NAME ...  # the change since then cannot move these figures

A result file holds the digest of the sources that `SOURCES` names for its script; comments, docstrings and formatting
do not count. Where the digest differs, the figures are stale and a test fails, until they are measured again or the
change is declared harmless in ``harmless.json``, with a reason that the page of figures prints. The next change of
the same sources asks again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DECLARED = ROOT / "benchmarks" / "harmless.json"

_STEP = (
    "guard",
    "memory",
    "numerics/gradients.py",
    "numerics/loss.py",
    "loader/splitting.py",
    "loader/random_state.py",
)
FIRST_LOOKS = frozenset({"not_learning_held_out_2", "not_learning_held_out_3", "world_first_look"})
"""Results of the one look at what was held out: they speak about the rules of that day, and are never made again."""

_WATCHED = ("supervise", "explain", "recorder")
_CHAOS = ("clock", "comparing", "digests", "injecting", "inside", "refusing", "trials", "trying", "workplace")
_ORIGIN = ("numerics", "guard/step/replay.py")
SOURCES: dict[str, tuple[str, ...]] = {
    "accumulation": _STEP,
    "async_saving": ("checkpoint", "guard/saving"),
    "bit_flips": ("checkpoint",),
    "chaos": (*(f"chaos/{name}.py" for name in _CHAOS), "supervise/injected"),
    "clipping": ("numerics/gradients.py",),
    "false_alarms": ("supervise/watch", "explain/hangs"),
    "folklore": ("numerics/gradients.py",),
    "forecast_extrapolation": ("forecast",),
    "forecast_large": ("forecast",),
    "forecast_live": ("forecast",),
    "forecast_peers": ("forecast",),
    "fuzz": ("core/files.py", "core/policy", "checkpoint", "recorder", "explain"),
    "gpu_forecast": ("forecast",),
    "gpu_oom_recovery": _STEP,
    "gpu_step_overhead": _STEP,
    "hang_detection": ("supervise", "explain/hangs"),
    "integrations": ("integrations", "guard", "loader", "checkpoint"),
    "leak_lines": ("supervise/leaks",),
    "loader_faults": ("loader",),
    "loader_overhead": ("loader",),
    "malloc_threshold": ("memory/host_memory.py",),
    "nan_batches": (*_STEP, "numerics"),
    "numerics_overhead": (*_STEP, "numerics"),
    "oom_recovery": _STEP,
    "provenance": _ORIGIN,
    "rank_kills": ("guard", "loader", "checkpoint", "supervise/launch"),
    "rank_peers": _STEP,
    "ranks": _STEP,
    "recipes": ("guard", "loader", "checkpoint", "memory"),
    "recorder": ("recorder",),
    "run_overhead": ("supervise/observe", "recorder"),
    "save_kills": ("checkpoint",),
    "scoreboard": ("chaos", "integrations", "guard", "loader", "checkpoint"),
    "sigkill": ("guard", "checkpoint", "loader"),
    "soak": ("guard", "checkpoint", "loader", "supervise", "recorder"),
    "spikes": ("numerics/spikes.py",),
    "step_overhead": (*_STEP, "learning", "checkpoint"),
    "supervised_kills": _WATCHED,
    "verdicts": ("explain",),
    "world": ("explain",),
}
"""By result file: files and folders under ``src/holdfast`` whose change could move its figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """A result file that does not speak about the code as it is.

    Args:
        name: Of the result.
        why: What is the matter with it.
    """

    name: str
    why: str


def digest(name: str, root: Path = ROOT) -> str:
    """Return the digest of the sources of a result, 64 hexadecimal digits.

    Args:
        name: Of the result file, without its ending.
        root: Of the checkout.

    Raises:
        LookupError: if `SOURCES` does not name the result, or names a source that is not there.
    """
    if name not in SOURCES:
        raise LookupError(f"benchmarks/freshness.py names no sources for {name!r}")
    total = hashlib.sha256()
    for source in SOURCES[name]:
        place = root / "src" / "holdfast" / source
        files = [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file())
        files = [each for each in files if "__pycache__" not in each.parts]
        if not files:
            raise LookupError(f"benchmarks/freshness.py: {name}: src/holdfast/{source} is not there")
        for file in files:
            total.update(f"{file.relative_to(root)}\n".encode())
            total.update(_code(file.read_bytes()) if file.suffix == ".py" else file.read_bytes())
    return total.hexdigest()


@cache  # many results name the same files
def _code(source: bytes) -> bytes:
    """Return what a Python file does: its tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def declared(file: Path = DECLARED) -> dict[str, dict[str, str]]:
    """Return the declarations by result: ``sources`` (the digest they are of), ``because`` and ``date``."""
    found: dict[str, dict[str, str]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def stale(root: Path = ROOT) -> list[Stale]:
    """Return the result files that do not hold for the code as it is, or that come from a dirty tree."""
    excuses = declared(root / DECLARED.relative_to(ROOT))
    found = []
    for file in sorted((root / RESULTS.relative_to(ROOT)).glob("*.json")):
        if file.stem in FIRST_LOOKS:
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        now = digest(file.stem, root)
        if result.get("sources") == now and result["commit"]["dirty"] is False:
            continue
        excuse = excuses.get(file.stem)
        if excuse is None or excuse["sources"] != now:
            dirty = result["commit"]["dirty"] is not False
            why = "it comes from a dirty tree" if dirty else "its sources have changed since"
            found.append(Stale(name=file.stem, why=why))
    return found


def declare(names: list[str], because: str, root: Path = ROOT) -> None:
    """Write down that the changes up to now cannot move these figures, and why."""
    place = root / DECLARED.relative_to(ROOT)
    excuses = declared(place)
    date = datetime.now(UTC).date().isoformat()
    for name in names:
        excuses[name] = {"sources": digest(name, root), "because": because, "date": date}
    place.write_text(json.dumps(dict(sorted(excuses.items())), indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harmless", metavar="WHY", help="declare the changes of these results harmless")
    parser.add_argument("names", nargs="*", help="results; all that are stale if none is given")
    given = parser.parse_args()
    if given.harmless:
        declare(given.names or [each.name for each in stale()], given.harmless)
    found = stale()
    for each in found:
        print(f"{each.name}: {each.why}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
