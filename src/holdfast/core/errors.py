"""All errors that holdfast raises, and the one constructor that builds them.

Every message states the problem, the limit that was violated, a fix and the rule id. The tree:

    HoldfastError
    ├── PolicyError (ValueError)          H1xx  a setting or an argument is wrong
    ├── BatchError (ValueError)           H2xx  a batch, a loss or a split cannot be used in a step
    ├── RunDirectoryError                 H30x  the run directory cannot be used
    ├── CheckpointError                   H31x  saved state cannot be written, trusted or loaded
    ├── OutOfMemoryError (MemoryError)    H4xx  out of memory, and no remedy is left that keeps the
    │                                           run's results as promised
    ├── DeviceError (RuntimeError)        H403  the device's context is dead
    ├── NonFiniteError (ArithmeticError)  H50x  NaN or Inf persists after skips and rollbacks
    ├── DivergenceError (ArithmeticError) H503  finite values keep diverging after rollbacks
    ├── LoaderError (ValueError)          H6xx  the data source cannot be iterated as requested
    └── RankError (RuntimeError)          H11x  another rank has failed, or is elsewhere in the code

`holdfast explain RULE` describes a rule; the descriptions are in ``explain.rules``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class HoldfastError(Exception):
    """The base of all errors that holdfast raises on purpose.

    Args:
        what: What is wrong, with its value and unit.
        limit: The rule or bound that was violated. It completes the sentence that `what` begins.
        fix: One action to take now.
        rule: Rule id such as ``"H101"``, known to ``holdfast explain``.
    """

    def __init__(self, what: str, *, limit: str, fix: str, rule: str) -> None:
        super().__init__(f"{what}; {limit}.\nFix: {fix}\n[{rule}] run `holdfast explain {rule}`")
        self.what = what
        self.limit = limit
        self.fix = fix
        self.rule = rule

    def __reduce__(self) -> tuple[Any, ...]:
        # Default pickling cannot call a keyword-only constructor. If a loader worker's exception
        # cannot be pickled, the parent waits forever (pytorch#142884).
        return _rebuild, (type(self), self.what, self.limit, self.fix, self.rule)


def _rebuild(
    error_class: type[HoldfastError], what: str, limit: str, fix: str, rule: str
) -> HoldfastError:
    return error_class(what, limit=limit, fix=fix, rule=rule)


class PolicyError(HoldfastError, ValueError):
    """A policy field, an environment variable or an argument cannot be used."""


class BatchError(HoldfastError, ValueError):
    """A batch, a loss or a split cannot be used in a step."""


class RunDirectoryError(HoldfastError):
    """The run directory is locked, is of another model or a newer version, or is not writable."""


class CheckpointError(HoldfastError):
    """A checkpoint cannot be written without pickle, verified, or loaded into these objects."""


class OutOfMemoryError(HoldfastError, MemoryError):
    """Memory ran out, and no remedy is left that keeps the run's results as promised."""


class DeviceError(HoldfastError, RuntimeError):
    """The device's context is dead: nothing in this process can use the device any more."""


class NonFiniteError(HoldfastError, ArithmeticError):
    """Non-finite values persist even after skipping steps and rolling back."""


class DivergenceError(HoldfastError, ArithmeticError):
    """Training keeps diverging with finite values, even after several rollbacks."""


class RankError(HoldfastError, RuntimeError):
    """Another rank has failed, or the ranks are not at the same point of the program."""


class LoaderError(HoldfastError, ValueError):
    """The loader yields no batch, or was built with arguments that exclude each other."""


# --- the nearest name -----------------------------------------------------------------------------

# Letters that look like a digit are treated as that digit.
_LOOKALIKES = str.maketrans("oil|sbz", "0111582")


def nearest(name: object, known: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the known name that is most similar to a name, or None if none is similar enough.

    Args:
        name: The name to look up.
        known: The existing names.
        least: The minimum similarity, from 0 (nothing in common) to 1 (identical). The default is
            that of `difflib.get_close_matches`.
    """
    # Imported here, because every observed process imports `errors`, but few look up a name.
    import difflib

    known_by_folded = {_fold(known_name): known_name for known_name in known}
    matches = difflib.get_close_matches(_fold(str(name)), known_by_folded, n=1, cutoff=least)
    return known_by_folded[matches[0]] if matches else None


def did_you_mean(name: object, known: Iterable[str], *, otherwise: str) -> str:
    """Return "did you mean ...?" with the nearest known name, or `otherwise` if none is similar."""
    nearest_name = nearest(name, known)
    if nearest_name is None:
        return otherwise
    return f"did you mean {nearest_name!r}?"


def _fold(name: str) -> str:
    return name.lower().translate(_LOOKALIKES)
