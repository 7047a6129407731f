"""The errors of a feature cache, H620 to H625: what was found, why it is refused, what to do."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import LoaderError

_NAMED = 5
"""Differences or items that a message names; more are counted."""


def stale(path: Path, found: list[str], *, unfinished: bool) -> LoaderError:
    """Return the error for features of another function, parameters or dataset.

    Args:
        path: The cache.
        found: What differs, in words.
        unfinished: Whether it is a build that was not finished.
    """
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return LoaderError(
        f"{'the unfinished build of ' if unfinished else ''}feature cache {path} was made from something else: "
        f"{'; '.join(found[:_NAMED])}{more}",
        limit="features of something else would be trained on without a sign",
        fix="pass rebuild=True to compute it anew, or use another path.",
        rule="H620",
    )


def foreign(path: Path, why: str) -> LoaderError:
    """Return the error for a file that is another one than was asked for."""
    return LoaderError(
        f"{path} {why}",
        limit="a file that holdfast did not write is neither read nor replaced",
        fix="use another path, or remove the file yourself if nobody needs it.",
        rule="H620",
    )


def replaced(path: Path) -> LoaderError:
    """Return the error for a cache that is not the one that was opened before."""
    return LoaderError(
        f"feature cache {path} was replaced by another one since it was opened",
        limit="features of something else would be trained on without a sign",
        fix="open it anew with FeatureCache(path), in every process.",
        rule="H620",
    )


def being_written(path: Path, builder: str, items: int) -> LoaderError:
    """Return the error for a cache that has a builder at the moment."""
    return LoaderError(
        f"feature cache {path} is being written by {builder}, {items} items so far",
        limit="it has one writer, and can be read when all items are there",
        fix="wait until that build is done, or stop it and call FeatureCache.build again: it continues.",
        rule="H621",
    )


def unfinished(path: Path, items: int) -> LoaderError:
    """Return the error for a cache whose builder is gone."""
    return LoaderError(
        f"feature cache {path} is not finished: its build was stopped after {items} items",
        limit="it can be read when all items are there",
        fix="call FeatureCache.build again with the same arguments: it continues.",
        rule="H621",
    )


def damaged(path: Path, why: str) -> LoaderError:
    """Return the error for a file that does not hold what was written."""
    return LoaderError(
        f"feature cache {path}: {why}",
        limit="an item is handed out only if every byte verifies",
        fix="copy the file again from where it came, or build it anew with rebuild=True; one that cannot even be "
        "opened must be removed first.",
        rule="H622",
    )


def damaged_items(path: Path, bad: list[int], length: int) -> LoaderError:
    """Return the error for a file in which these items do not verify."""
    named = ", ".join(map(str, bad[:_NAMED])) + (", ..." if len(bad) > _NAMED else "")
    return damaged(path, f"{len(bad)} of {length} items do not match their digests (items {named})")


def not_computed(index: int, what: str) -> LoaderError:
    """Return the error for an item whose features cannot be had."""
    return LoaderError(
        f"item {index} of the dataset {what}",
        limit="a feature cache holds the features of every item",
        fix="correct the sample or fn (num_workers=0 computes in this process, for a debugger), then call "
        "FeatureCache.build again: the items before are kept as long as fn is the same.",
        rule="H623",
    )


def refused(path: Path, error: OSError) -> LoaderError:
    """Return the error for a disk that does not let us."""
    return LoaderError(
        f"feature cache {path}: {error.strerror or error}",
        limit="the file and a folder beside it must be readable, and writable while it is built",
        fix="make room or give permission, then call FeatureCache.build again: what was computed is kept.",
        rule="H624",
    )


def unusable(what: str, limit: str, fix: str) -> LoaderError:
    """Return the error for an argument or a machine that no cache can be had with."""
    return LoaderError(what, limit=limit, fix=fix, rule="H625")
