"""Simulate a full or failing disk by making reads or writes of the training processes fail."""

from __future__ import annotations

import resource
from pathlib import Path
from stat import S_ISREG

from holdfast.chaos.injection.listener import CallListener, SuspendedCall
from holdfast.chaos.injection.plan import AttemptPlan
from holdfast.chaos.injection.seccomp import FTRUNCATE


class Refuser(CallListener):
    """Makes reads or writes fail, and counts these.

    Args:
        folder: The trace folder of the attempt; see `CallListener`.
        plan: The plan of the attempt. The plan's injection has an `errno`, and either an
            `unreadable_file`, whose reads fail, or `size_bytes`, beyond which files in the
            workplace cannot grow.
    """

    def __init__(self, folder: Path, plan: AttemptPlan) -> None:
        assert plan.injection.errno is not None
        self._errno = plan.injection.errno
        self.refused_calls = 0
        super().__init__(folder, plan)

    def decide(self, call: SuspendedCall) -> int:
        """Return the planned error number if a call must fail, otherwise 0."""
        if not self._should_refuse(call):
            return 0
        self.refused_calls += 1
        return self._errno

    def _should_refuse(self, call: SuspendedCall) -> bool:
        if self._injection.refuse_once and self.refused_calls:
            return False
        path = call.open_file.readlink()
        if self._injection.unreadable_file is not None:
            return path == Path(self._injection.unreadable_file)
        status = call.open_file.stat()
        if not S_ISREG(status.st_mode) or not self._is_writable(path):
            return False
        # `ftruncate` extends a file up to its new size, so its last byte is at the new size minus
        # 1. A write is assumed to start at the end of the file.
        position = call.arguments[1] - 1 if call.number in FTRUNCATE else status.st_size
        assert self._injection.size_bytes is not None
        if position < self._injection.size_bytes:
            return False
        if self._injection.refuse_once:
            # Lift the file size limit that `Injector` has set, which would also cut short the
            # writes that follow.
            _, hard_limit = resource.prlimit(call.process, resource.RLIMIT_FSIZE)
            resource.prlimit(call.process, resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
        return True
