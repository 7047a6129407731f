"""Find the newest checkpoint that a trial has written, and damage it."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeAlias

from holdfast.chaos.faults import flip_bit
from holdfast.chaos.workplace import Workplace

# File name suffixes that no checkpoint has. holdfast's recorder writes the ``.ring`` files.
TEXT_SUFFIXES = frozenset(
    {".log", ".txt", ".csv", ".json", ".jsonl", ".out", ".yaml", ".yml", ".ring"}
)

# A function that damages a file at a position drawn from the random generator.
DamageAction: TypeAlias = Callable[[Path, random.Random], None]


def damage_newest_checkpoint(
    workplace: Workplace,
    saved: Sequence[Path],
    *,
    action: DamageAction,
    chance: random.Random,
    read_names: AbstractSet[str],
) -> Path | None:
    """Damage the newest checkpoint in a workplace.

    Args:
        workplace: The workplace of the trial.
        saved: The paths to which the script was observed saving.
        action: The function that damages the file.
        chance: The random generator from which the position of the damage is drawn.
        read_names: The names of files that restarts have read, from `name_without_numbers`.

    Returns:
        The damaged file, or None if the script has written no checkpoint.
    """
    path = newest_checkpoint(workplace, saved, read_names)
    if path is not None:
        action(path, chance)
    return path


def newest_checkpoint(
    workplace: Workplace, saved: Iterable[Path], read_names: AbstractSet[str]
) -> Path | None:
    """Return the newest large file among the files that are most likely checkpoints.

    A file is large if it is at least half the size of the largest candidate. Smaller files are
    excluded, because a script may write a small file, such as a log, after each checkpoint. The
    result is None if the script has written no file.
    """
    candidates = files_written(workplace)
    if not candidates:
        return None
    saved_paths = set(saved)
    criteria: tuple[Callable[[Path], bool], ...] = (
        # The script was observed saving to this file, or to a folder that contains it.
        lambda path: not saved_paths.isdisjoint((path, *path.parents)),
        lambda path: path.suffix not in TEXT_SUFFIXES,
        lambda path: name_without_numbers(path) in read_names,
    )
    for criterion in criteria:
        matching = {path: status for path, status in candidates.items() if criterion(path)}
        # A criterion that no file meets is ignored.
        candidates = matching or candidates
    largest_bytes = max(status.st_size for status in candidates.values())
    large = [path for path, status in candidates.items() if 2 * status.st_size >= largest_bytes]
    return max(large, key=lambda path: candidates[path].st_mtime_ns)


def files_written(workplace: Workplace) -> dict[Path, os.stat_result]:
    """Return the nonempty files that the script has written in this trial, with their status.

    A file with a hard link outside of the workplace is excluded, because damaging it could destroy
    the user's data.
    """
    files = workplace.files()
    links_inside = Counter(status.st_ino for status in files.values())
    written = {}
    for path, status in files.items():
        has_link_outside = status.st_nlink > links_inside[status.st_ino]
        original = workplace.original(path)
        is_unchanged = original is not None and original.stat().st_mtime_ns == status.st_mtime_ns
        if status.st_size > 0 and not has_link_outside and not is_unchanged:
            written[path] = status
    return written


def flip_random_bit(path: Path, chance: random.Random) -> None:
    """Flip one random bit of a file."""
    flip_bit(path, chance.randrange(8 * path.stat().st_size))


def truncate_to_half(path: Path, _chance: random.Random) -> None:
    """Truncate a file to half its size."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def leave_intact(_path: Path, _chance: random.Random) -> None:
    """Leave the file unchanged, for a fault in which reading the file fails instead."""


def name_without_numbers(path: object) -> str:
    """Return a path with "#" in place of each number, since steps and times differ by attempt."""
    return re.sub(r"\d+", "#", str(path))
