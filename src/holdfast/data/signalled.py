"""An exception that a signal's handler raised while a sample was being read: it is not the sample's."""

from __future__ import annotations

import signal
import traceback


def let_through(error: BaseException) -> None:
    """Raise an exception again if a handler of a signal raised it, such as ``sys.exit()`` at SIGTERM.

    A handler runs wherever the main thread is, so also in the middle of a sample. Whoever deals with what samples
    raise would take it for one of theirs, try again, and go on.
    """
    handlers = [getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()]
    codes = {code for code in handlers if code is not None}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error
