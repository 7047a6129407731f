"""`ExceptHook`: tell the other ranks about an exception that ends this process."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, final

from holdfast.guard.ranks.failures import Failures, print_error


@final
class ExceptHook:
    """Replaces `sys.excepthook` while a guard is open.

    Args:
        failures: Reports the failures of this rank.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        # The hook that was replaced. None while this hook is not installed.
        self._previous: Any = None

    def install(self) -> None:
        """Install the hook if it is not installed yet."""
        if self._previous is None:
            self._previous = sys.excepthook
            sys.excepthook = self._report

    def uninstall(self) -> None:
        """Restore the previous hook, unless another hook was installed after this one."""
        if self._previous is not None and sys.excepthook == self._report:
            sys.excepthook = self._previous
        self._previous = None

    def _report(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        # This is the hook: it reports an uncaught exception to the other ranks, unless this rank
        # has already reported one, and then calls the previous hook.
        cause = None
        if not self._failures.has_failed:
            cause = self._failures.cause_of(error)
            self._failures.publish(cause or error)
        (self._previous or sys.__excepthook__)(kind, error, traceback)
        if cause is not None:
            print_error(cause)
