"""All errors that holdfast raises. They share one constructor, which builds the message.

Every message states the problem, the limit that was violated, a fix and the rule id. The class
hierarchy, with the built-in base class and the rule ids of each class:

    HoldfastError
    ├── PolicyError (ValueError)          H1xx  a setting or an argument is wrong
    ├── BatchError (ValueError)           H2xx  a batch, a loss or a split cannot be used in a step
    ├── RunDirectoryError                 H30x  the run directory cannot be used
    │                                     H32x  its mirror cannot be used
    ├── CheckpointError                   H31x  saved state cannot be written, trusted or loaded
    ├── OutOfMemoryError (MemoryError)    H4xx  out of memory, and no remedy is left that keeps the
    │                                           run's results as promised
    ├── DeviceError (RuntimeError)        H403  the device's context is dead
    ├── NonFiniteError (ArithmeticError)  H50x  NaN or Inf persists after skips and rollbacks
    ├── DivergenceError (ArithmeticError) H503  finite values keep diverging after rollbacks
    ├── LoaderError (ValueError)          H6xx  the data source cannot be iterated as requested
    └── RankError (RuntimeError)          H11x  another rank failed, or is at another point in the
                                                program

`holdfast explain RULE` describes a rule; the descriptions are in ``explain.rules``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class HoldfastError(Exception):
    """The base class of all errors that holdfast raises on purpose.

    Args:
        what: What is wrong, with its value and unit.
        limit: The rule or bound that was violated. It completes the sentence that `what` begins.
        fix: One action that the user can take now.
        rule: The rule id, such as ``"H101"``, which ``holdfast explain`` describes.
    """

    def __init__(self, what: str, *, limit: str, fix: str, rule: str) -> None:
        super().__init__(f"{what}; {limit}.\nFix: {fix}\n[{rule}] run `holdfast explain {rule}`")
        self.what = what
        self.limit = limit
        self.fix = fix
        self.rule = rule

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, unpickling cannot pass keyword-only arguments to the constructor. If a loader
        # worker's exception cannot be pickled, the main process waits forever (pytorch#142884).
        return _rebuild, (type(self), self.what, self.limit, self.fix, self.rule)


def _rebuild(
    error_class: type[HoldfastError], what: str, limit: str, fix: str, rule: str
) -> HoldfastError:
    # Unpickling calls this function; see `HoldfastError.__reduce__`.
    return error_class(what, limit=limit, fix=fix, rule=rule)


class PolicyError(HoldfastError, ValueError):
    """A policy field, an environment variable or an argument has an invalid value."""


class BatchError(HoldfastError, ValueError):
    """A batch, a loss or a split cannot be used in a step."""


class RunDirectoryError(HoldfastError):
    """The run directory is locked or not writable, or is from another model or a newer version."""


class CheckpointError(HoldfastError):
    """A checkpoint cannot be written without pickle, fails verification, or cannot be loaded."""


class OutOfMemoryError(HoldfastError, MemoryError):
    """Memory ran out, and no remedy is left that keeps the run's results as promised."""


class DeviceError(HoldfastError, RuntimeError):
    """The device's context is dead: nothing in this process can use the device any more."""


class NonFiniteError(HoldfastError, ArithmeticError):
    """Non-finite values persist even after skipping steps and rolling back."""


class DivergenceError(HoldfastError, ArithmeticError):
    """Training keeps diverging with finite values, even after several rollbacks."""


class RankError(HoldfastError, RuntimeError):
    """Another rank has failed, or the ranks are not at the same point in the program."""


class LoaderError(HoldfastError, ValueError):
    """The loader yields no batches, or was created with arguments that exclude each other."""


# --- the nearest name -----------------------------------------------------------------------------

# Characters that look like a digit are replaced by that digit before names are compared.
_LOOKALIKES = str.maketrans("oil|sbz", "0111582")


def nearest(name: object, known: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the known name that is most similar to a name, or None if none is similar enough.

    Args:
        name: The name to look up, such as a misspelled one.
        known: The valid names.
        least: The minimum similarity, from 0 (nothing in common) to 1 (identical). The default is
            the same as in `difflib.get_close_matches`.
    """
    # Imported here because every observed process imports `errors`, but few processes need to look
    # up a name.
    import difflib

    known_by_folded = {_fold(known_name): known_name for known_name in known}
    matches = difflib.get_close_matches(_fold(str(name)), known_by_folded, n=1, cutoff=least)
    return known_by_folded[matches[0]] if matches else None


def did_you_mean(name: object, known: Iterable[str], *, otherwise: str) -> str:
    """Return "did you mean ...?" with the most similar known name, or `otherwise` if none is."""
    nearest_name = nearest(name, known)
    if nearest_name is None:
        return otherwise
    return f"did you mean {nearest_name!r}?"


def _fold(name: str) -> str:
    # Names that differ only in case or in look-alike characters become equal.
    return name.lower().translate(_LOOKALIKES)
