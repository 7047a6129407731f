"""The checkpoints that validated best, beside the newest ones, and how long none was better.

    best/accuracy/best.json                         values, steps, and which of them are kept
    best/accuracy/checkpoints/000012-step00000600/  links to the files of a checkpoint, which need
                                                    no more room

A metric's folder is read by ``holdfast checkpoints`` as a run directory is.
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

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FILE = "best.json"
_KEPT = re.compile(r"checkpoints/[\w-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """A checkpoint that was kept for its value.

    Args:
        value: Of the metric.
        global_step: Optimizer steps in it.
        path: Its folder.
    """

    value: float
    global_step: int
    path: Path


def as_metric(value: Any, keep: Any, patience: Any) -> float:
    """Return what was measured as a number.

    H105 for what is none, and for numbers of best ones or of patience.
    """
    counts = {"keep": (keep, 0), "patience": (patience, 1)}.items()
    wrong = [
        f"{name}={each!r}"
        for name, (each, least) in counts
        if each is not None and (type(each) is not int or each < least)
    ]
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if not wrong and not isinstance(value, str):
            return float(value)
    raise PolicyError(
        f"validated with {', '.join(wrong) or f'{value!r:.100}'}",
        limit="a metric is one number, keep a whole number from 0 on, and patience one from 1 on",
        fix='such as guard.validated(accuracy, name="accuracy", mode="max", keep=2, patience=5).',
        rule="H105",
    )


class BestOf:
    """What is known of one metric, in this process and in those before it."""

    def __init__(
        self, run_dir: Path, name: str, mode: Literal["min", "max"], *, writes: bool
    ) -> None:
        if not _NAME.fullmatch(str(name)) or name.startswith(".") or mode not in ("min", "max"):
            raise PolicyError(
                f"validated with name={name!r} and mode={mode!r}",
                limit=(
                    'a name has 1 to 64 letters, digits, "_", "-" and "."; a mode is "min" or "max"'
                ),
                fix='such as guard.validated(accuracy, name="accuracy", mode="max").',
                rule="H105",
            )
        self._folder, self._sign, self._writes = (
            run_dir / "best" / name,
            1.0 if mode == "min" else -1.0,
            writes,
        )
        self.kept: list[Best] = []
        """The best first."""
        self._value, self._step = math.nan, -1
        self._since: set[int] = set()  # steps: what is made again after a restart counts once
        with contextlib.suppress(
            OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError
        ):
            self._take(json.loads(read_file(self._folder / _FILE)))

    def _take(self, found: dict[str, Any]) -> None:
        """Take what the file says, all or nothing.

        A folder that it names is removed one day, and must be ours.
        """
        kept = [
            Best(
                value=float(each["value"]),
                global_step=int(each["global_step"]),
                path=self._folder / each["path"],
            )
            for each in found["kept"]
            if _KEPT.fullmatch(each["path"])
        ]
        value, step, since = (
            float(found["value"]),
            int(found["step"]),
            set(map(int, found["since"])),
        )
        self.kept, self._value, self._step, self._since = kept, value, step, since

    @property
    def waited(self) -> int:
        """Return how many validations there were since the best one."""
        return len(self._since)

    def is_better(self, value: float, global_step: int, most: int) -> bool:
        """Take in a value; return whether its checkpoint is among the best, so many of which are
        kept.
        """
        if math.isfinite(value) and not self._sign * value >= self._sign * self._value:
            self._value, self._step, self._since = value, global_step, set()
        elif global_step > self._step:
            self._since.add(global_step)
        better = len(self.kept) < most or any(
            self._sign * value < self._sign * each.value for each in self.kept
        )
        return most > 0 and better and math.isfinite(value)

    def link(self, entry: Entry) -> None:
        """Keep a checkpoint by links. OSError: the disk refuses."""
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
        """Count a checkpoint that was linked among the best, and remove what is not among them
        any more.
        """
        kept = [each for each in self.kept if each.global_step != entry.global_step]
        kept.append(Best(value=value, global_step=entry.global_step, path=self._path_of(entry)))
        kept.sort(key=lambda each: (self._sign * each.value, each.global_step))
        every = {each.path for each in (*self.kept, *kept)}
        self.kept = kept[:most]
        if self._writes:
            for path in every - {each.path for each in self.kept}:
                remove(path)

    def write(self) -> None:
        """Write down what is known, if the disk takes it.

        What it refuses is lost with this process at most.
        """
        if self._writes:
            kept = [
                asdict(each) | {"path": str(each.path.relative_to(self._folder))}
                for each in self.kept
            ]
            facts = {
                "value": self._value,
                "step": self._step,
                "since": sorted(self._since),
                "kept": kept,
            }
            with contextlib.suppress(OSError):
                make_folder(self._folder.parent.parent, "best", self._folder.name)
                replace_file(self._folder / _FILE, json.dumps(facts).encode())


def best_in(folder: Path) -> int | None:
    """Return the step of the best checkpoint in a metric's folder, -1 where that is lost.

    None in another folder.
    """
    if not (folder / _FILE).exists():
        return None
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        return int(json.loads(read_file(folder / _FILE))["kept"][0]["global_step"])
    return -1


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
