"""When a command that was asked to end is killed, and which signal counts as the request."""

from __future__ import annotations

import math
import signal

from holdfast.supervise.launch.shutdown import Shutdown


def test_a_request_starts_the_grace_period_and_a_second_ctrl_c_ends_it() -> None:
    """A second Ctrl-C kills at once; the same key press that is forwarded twice does not."""
    shutdown = Shutdown(grace_seconds=25.0)
    assert shutdown.kill_at == math.inf

    shutdown.note_signal(signal.SIGINT, arrived_at=100.0)
    assert shutdown.kill_at == 125.0
    shutdown.note_signal(signal.SIGINT, arrived_at=100.1)
    assert shutdown.kill_at == 125.0

    shutdown = Shutdown(grace_seconds=25.0)
    shutdown.note_signal(signal.SIGINT, arrived_at=100.0)
    shutdown.note_signal(signal.SIGINT, arrived_at=101.0)
    assert shutdown.kill_at == 101.0


def test_a_third_request_kills_at_once() -> None:
    """Whoever sends SIGTERM three times means it."""
    shutdown = Shutdown(grace_seconds=25.0)
    for arrived_at in (100.0, 101.0, 102.0):
        shutdown.note_signal(signal.SIGTERM, arrived_at=arrived_at)
    assert shutdown.kill_at == 102.0


def test_a_signal_that_the_command_may_handle_is_a_request_only_if_it_died_of_it() -> None:
    """SIGUSR1 may mean "save"; a shell reports the death by signal n as exit code 128 + n."""
    shutdown = Shutdown(grace_seconds=25.0)
    shutdown.note_signal(signal.SIGUSR1, arrived_at=100.0)
    assert shutdown.kill_at == math.inf
    assert not shutdown.is_requested
    assert shutdown.requested_by(status=0) is None
    assert shutdown.requested_by(status=-signal.SIGUSR1) == signal.SIGUSR1
    assert shutdown.requested_by(status=128 + signal.SIGUSR1) == signal.SIGUSR1


def test_sigterm_and_sighup_are_requests_whatever_the_exit_code() -> None:
    """After SIGHUP the terminal is gone, so nobody would see another start."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        shutdown = Shutdown(grace_seconds=25.0)
        shutdown.note_signal(number, arrived_at=100.0)
        assert shutdown.requested_by(status=0) == number
