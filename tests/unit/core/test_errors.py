"""Errors: three parts and a rule in every message, one tree, and they survive pickling."""

from __future__ import annotations

import pickle

from holdfast.core import errors
from holdfast.core.errors import HoldfastError

_TREE = {
    errors.PolicyError: ValueError,
    errors.BatchError: ValueError,
    errors.RunDirectoryError: Exception,
    errors.CheckpointError: Exception,
    errors.OutOfMemoryError: MemoryError,
    errors.DeviceError: RuntimeError,
    errors.NonFiniteError: ArithmeticError,
    errors.DivergenceError: ArithmeticError,
    errors.LoaderError: ValueError,
    errors.RankError: RuntimeError,
}


def test_the_message_says_what_the_limit_the_fix_and_the_rule() -> None:
    """The text of an error is its three parts and the command that explains its rule."""
    error = HoldfastError("size=0", limit="at least 1 is needed", fix="pass 1.", rule="H101")
    assert (
        str(error)
        == "size=0; at least 1 is needed.\nFix: pass 1.\n[H101] run `holdfast explain H101`"
    )
    assert (error.what, error.limit, error.fix, error.rule) == (
        "size=0",
        "at least 1 is needed",
        "pass 1.",
        "H101",
    )


def test_the_table_of_this_file_is_the_whole_tree() -> None:
    """Every error class of the module hangs directly below the family.

    Damaged files are no mistakes of arguments.
    """
    found = {
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, HoldfastError)
    }
    assert found - {HoldfastError} == set(_TREE)
    damaged = (errors.CheckpointError, errors.RunDirectoryError)
    assert not any(issubclass(kind, (ValueError, OSError)) for kind in damaged)


def test_each_error_is_caught_by_its_builtin_family_and_survives_pickling() -> None:
    """Code that knows nothing of holdfast catches these.

    One from a loader worker reaches the parent whole.
    """
    for kind, builtin in _TREE.items():
        error = kind("what", limit="limit", fix="fix", rule="H311")
        assert isinstance(error, builtin)
        assert isinstance(error, HoldfastError)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            twin = pickle.loads(pickle.dumps(error, protocol))
            assert type(twin) is kind
            assert str(twin) == str(error)
            assert (twin.what, twin.limit, twin.fix, twin.rule) == ("what", "limit", "fix", "H311")
