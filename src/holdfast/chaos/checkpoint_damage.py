"""Choose the newest checkpoint that a trial has written, and damage it."""

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

# No checkpoint has one of these suffixes; a guard's recorder writes ``.ring``.
TEXT_SUFFIXES = frozenset(
    {".log", ".txt", ".csv", ".json", ".jsonl", ".out", ".yaml", ".yml", ".ring"}
)

# Damages a file at a place drawn from the random generator.
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
        workplace: The workplace.
        saved: Paths of observed saves.
        action: Damages the file.
        chance: Decides where.
        read_names: Names, by `name_without_numbers`, of files that restarts have read.

    Returns:
        The damaged file, None if the script has written no checkpoint.
    """
    path = newest_checkpoint(workplace, saved, read_names)
    if path is not None:
        action(path, chance)
    return path


def newest_checkpoint(
    workplace: Workplace, saved: Iterable[Path], read_names: AbstractSet[str]
) -> Path | None:
    """Return the newest large file among those that are most likely checkpoints.

    A file is large if it has at least half the size of the largest one: a small file beside a
    checkpoint may be newer.
    """
    candidates = files_written(workplace)
    if not candidates:
        return None
    saved_paths = set(saved)
    criteria: tuple[Callable[[Path], bool], ...] = (
        # A save of the file, or of a folder that contains it, was observed.
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
    """Return the files that the script has written in this trial and that are not empty.

    A file with a hard link outside of the workplace is left out: it may be user data.
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
    """Flip one bit of a file."""
    flip_bit(path, chance.randrange(8 * path.stat().st_size))


def truncate_to_half(path: Path, _chance: random.Random) -> None:
    """Cut a file to half of its size."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def leave_intact(_path: Path, _chance: random.Random) -> None:
    """Do nothing to a file: the kernel will refuse to read it instead."""


def name_without_numbers(path: object) -> str:
    """Return a path with "#" for each number: steps and times differ between attempts."""
    return re.sub(r"\d+", "#", str(path))
