"""Every error that holdfast raises, built by one constructor.

What, the limit, the fix, the rule id.

    HoldfastError
    ├── PolicyError (ValueError)          H1xx  a setting or an argument is wrong
    ├── BatchError (ValueError)           H2xx  a batch, a loss or a split is not what a step can
    use ├── RunDirectoryError                 H30x  the run directory cannot be used ├──
    CheckpointError                   H31x  saved state cannot be written, trusted or loaded ├──
    OutOfMemoryError (MemoryError)    H4xx  memory is short and every remedy that keeps the promise
    is spent ├── DeviceError (RuntimeError)         H403  the device's context is dead ├──
    NonFiniteError (ArithmeticError)  H50x  NaN or Inf persists after skipping and rolling back ├──
    DivergenceError (ArithmeticError) H503  finite values that run away persist after rolling back
    ├── LoaderError (ValueError)          H6xx  the data source cannot be iterated as asked └──
    RankError (RuntimeError)          H11x  another rank has failed, or is somewhere else

`holdfast explain` says what each rule means, from the catalogue in ``explain.rules``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class HoldfastError(Exception):
    """The family of all errors that holdfast raises on purpose.

    Args:
        what: What was found, with its value and unit.
        limit: What it broke: the rule or bound, as the rest of the sentence.
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
        # A keyword-only constructor breaks the default pickling, and an exception that cannot be
        # pickled in a loader worker makes the parent wait for ever (pytorch#142884).
        return _rebuild, (type(self), self.what, self.limit, self.fix, self.rule)


_ALIKE = str.maketrans("oil|sbz", "0111582")


def nearest(name: object, known: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the known name that is most like another one, letters and figures that look alike
    taken for the same.

    `least` is how alike it must be at least: 1 for the same, 0 for nothing in common.
    """
    import difflib  # every process that is observed imports this module

    folded = {each.lower().translate(_ALIKE): each for each in known}
    near = difflib.get_close_matches(str(name).lower().translate(_ALIKE), folded, n=1, cutoff=least)
    return folded[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str], *, otherwise: str) -> str:
    """Return the fix for a name that is not known.

    The nearest of those that are, `otherwise` where none is alike.
    """
    near = nearest(name, known)
    return otherwise if near is None else f"did you mean {near!r}?"


def _rebuild(
    kind: type[HoldfastError], what: str, limit: str, fix: str, rule: str
) -> HoldfastError:
    return kind(what, limit=limit, fix=fix, rule=rule)


class PolicyError(HoldfastError, ValueError):
    """A policy field, an environment variable or an argument cannot be used."""


class BatchError(HoldfastError, ValueError):
    """A batch, a loss or a split cannot be used in a step."""


class RunDirectoryError(HoldfastError):
    """The run directory is locked, foreign, newer, or cannot be written."""


class CheckpointError(HoldfastError):
    """Saved state cannot be written without pickle, verified, or loaded into these objects."""


class OutOfMemoryError(HoldfastError, MemoryError):
    """Memory is short and no remedy that keeps its promise is left."""


class DeviceError(HoldfastError, RuntimeError):
    """The device's context is dead: nothing in this process can use it any more."""


class NonFiniteError(HoldfastError, ArithmeticError):
    """Non-finite values persist although steps were skipped and the state was rolled back."""


class DivergenceError(HoldfastError, ArithmeticError):
    """Training runs away, with finite values, although it went back to a good state several
    times.
    """


class RankError(HoldfastError, RuntimeError):
    """Another rank has failed, or the ranks are not at the same place."""


class LoaderError(HoldfastError, ValueError):
    """The loader gives no batch, or was built with arguments that exclude each other."""
