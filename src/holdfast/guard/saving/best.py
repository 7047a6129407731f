"""Keep the best checkpoints according to each metric, in addition to the newest checkpoints.

    best/accuracy/best.json                         the best values and their steps
    best/accuracy/checkpoints/000012-step00000600/  hard links to the files of a checkpoint, which
                                                    take no extra disk space

``holdfast checkpoints`` can read a metric's folder as if it were a run directory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpoint.store import Entry
from holdfast.core.durable import replace_file
from holdfast.core.errors import PolicyError
from holdfast.core.files import make_folder, read_file, remove

_METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FILE = "best.json"
# The path of one of the best checkpoints, relative to the metric's folder.
_PATH = re.compile(r"checkpoints/[\w-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """One of the best checkpoints according to a metric.

    Args:
        value: The value of the metric.
        global_step: The number of optimizer steps in the checkpoint.
        path: The folder of the checkpoint.
    """

    value: float
    global_step: int
    path: Path


def as_metric(value: Any, keep: Any, patience: Any) -> float:
    """Check the arguments of `Guard.validated`, and return the metric's value as a float.

    Raises:
        PolicyError: H105 if the value is not a number, or if `keep` or `patience` is not a whole
            number in the allowed range.
    """
    wrong = []
    if not _is_count(keep, smallest=0):
        wrong.append(f"keep={keep!r}")
    if not _is_count(patience, smallest=1):
        wrong.append(f"patience={patience!r}")
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if not wrong and not isinstance(value, str):
            return float(value)
    raise PolicyError(
        f"validated with {', '.join(wrong) or f'{value!r:.100}'}",
        limit=(
            "the metric must be a number, keep a whole number of at least 0, and patience a whole"
            " number of at least 1"
        ),
        fix='for example: guard.validated(accuracy, name="accuracy", mode="max", keep=2).',
        rule="H105",
    )


def _is_count(count: Any, *, smallest: int) -> bool:
    """Return whether a value is None or a whole number of at least `smallest`."""
    return count is None or (type(count) is int and count >= smallest)


class BestOf:
    """The best checkpoints of one metric, including those from earlier processes of the run.

    Args:
        run_dir: The run directory.
        name: The name of the metric.
        mode: Whether lower or higher values are better.
        writes: Whether this process writes and removes files. With several ranks, only one does.

    Raises:
        PolicyError: H105 for an invalid name or mode.
    """

    def __init__(
        self, run_dir: Path, name: str, mode: Literal["min", "max"], *, writes: bool
    ) -> None:
        is_name = _METRIC_NAME.fullmatch(str(name)) and not name.startswith(".")
        if not is_name or mode not in ("min", "max"):
            raise PolicyError(
                f"validated with name={name!r} and mode={mode!r}",
                limit=(
                    'a name consists of 1 to 64 letters, digits, "_", "-" and ".", and the mode is'
                    ' "min" or "max"'
                ),
                fix='for example: guard.validated(accuracy, name="accuracy", mode="max").',
                rule="H105",
            )
        self._folder = run_dir / "best" / name
        self._lower_is_better = mode == "min"
        self._writes = writes
        # Sorted, with the best checkpoint first.
        self.kept: list[Best] = []
        # The best value, and the step at which it was measured.
        self._value = math.nan
        self._step = -1
        # The steps of the validations since the best one. This is a set, so that a validation that
        # is repeated after a restart counts only once.
        self._since: set[int] = set()
        with contextlib.suppress(
            OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError
        ):
            self._load(json.loads(read_file(self._folder / _FILE)))

    def _load(self, content: dict[str, Any]) -> None:
        """Load the content of ``best.json``. If it is damaged, raise an error and load nothing."""
        kept = [
            Best(
                value=float(best["value"]),
                global_step=int(best["global_step"]),
                path=self._folder / best["path"],
            )
            for best in content["kept"]
            # This path may be removed later, so a damaged file must not point anywhere else.
            if _PATH.fullmatch(best["path"])
        ]
        value = float(content["value"])
        step = int(content["step"])
        since = set(map(int, content["since"]))

        self.kept = kept
        self._value = value
        self._step = step
        self._since = since

    @property
    def waited(self) -> int:
        """Return the number of validations since the best one."""
        return len(self._since)

    def is_better(self, value: float, global_step: int, most: int) -> bool:
        """Record a value, and return whether its checkpoint is one of the best.

        Args:
            value: The value of the metric.
            global_step: The step at which it was measured.
            most: The number of best checkpoints to keep.
        """
        if math.isfinite(value) and (math.isnan(self._value) or self._improves(value, self._value)):
            self._value = value
            self._step = global_step
            self._since = set()
        elif global_step > self._step:
            self._since.add(global_step)

        if most == 0 or not math.isfinite(value):
            return False
        return len(self.kept) < most or any(self._improves(value, best.value) for best in self.kept)

    def _improves(self, value: float, other: float) -> bool:
        """Return whether a value is better than another value."""
        if self._lower_is_better:
            return value < other
        return value > other

    def link(self, entry: Entry) -> None:
        """Keep a checkpoint by creating hard links to its files.

        Raises:
            OSError: If the links cannot be created.
        """
        path = self._path_of(entry)
        make_folder(self._folder.parent.parent, "best", self._folder.name, path.parent.name)
        draft = path.with_name(f".tmp-{path.name}")
        remove(draft)
        remove(path)
        try:
            shutil.copytree(entry.path, draft, copy_function=_link)
            draft.rename(path)
        except OSError:
            remove(draft)
            raise

    def _path_of(self, entry: Entry) -> Path:
        return self._folder / "checkpoints" / entry.path.name

    def keep(self, value: float, entry: Entry, most: int) -> None:
        """Add a linked checkpoint, and remove checkpoints that are no longer among the best.

        Args:
            value: The value of the metric.
            entry: The linked checkpoint.
            most: The number of best checkpoints to keep.
        """
        candidates = [best for best in self.kept if best.global_step != entry.global_step]
        candidates.append(
            Best(value=value, global_step=entry.global_step, path=self._path_of(entry))
        )
        candidates.sort(key=self._rank)
        paths = {best.path for best in (*self.kept, *candidates)}
        self.kept = candidates[:most]
        if self._writes:
            for path in paths - {best.path for best in self.kept}:
                remove(path)

    def _rank(self, best: Best) -> tuple[float, int]:
        """Return a checkpoint's sort key: the best one sorts first, and the older one in a tie."""
        if self._lower_is_better:
            return best.value, best.global_step
        return -best.value, best.global_step

    def write(self) -> None:
        """Write ``best.json``, if this process is responsible for writing.

        If writing fails, for example because the disk is full, no error is raised, and the values
        are lost when the process exits.
        """
        if not self._writes:
            return
        content = {
            "value": self._value,
            "step": self._step,
            "since": sorted(self._since),
            "kept": [
                {**asdict(best), "path": str(best.path.relative_to(self._folder))}
                for best in self.kept
            ],
        }
        with contextlib.suppress(OSError):
            make_folder(self._folder.parent.parent, "best", self._folder.name)
            replace_file(self._folder / _FILE, json.dumps(content).encode())


def best_in(folder: Path) -> int | None:
    """Return the step of the best checkpoint in a metric's folder.

    Returns:
        The step, -1 if the folder's file is damaged, or None if this is not a metric's folder.
    """
    if not (folder / _FILE).exists():
        return None
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        return int(json.loads(read_file(folder / _FILE))["kept"][0]["global_step"])
    return -1


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # The file system does not support hard links.
        shutil.copy2(source, target)
