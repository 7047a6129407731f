"""Coordinate the hosts of one run, so that each attempt starts and ends on all of them together.

Each host's supervisor publishes its state in a small file in a shared directory, and reads the
files of the other hosts once a second. Host 0 gives the start signal (``go``) when all hosts are
ready. Without this signal, a host that restarts quickly would connect to the rendezvous store of an
attempt that is still ending on another host, and both would wait forever.

A host goes through these values of ``state``:

coming     the host's supervisor has started
ready      the host is waiting to start an attempt, for which it has created a new ``ticket``
running    the attempt is running, because host 0 has put that ticket into its ``go``
ended      the attempt has ended with a ``cause``; ``follows`` is set if another host ended first
stopped    the host starts no further attempt; the state is ``done`` if the command succeeded

The clocks of hosts differ, so timestamps are never compared. A host counts as alive as long as its
file keeps changing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import make_folder, swap_in
from holdfast.recorder.run_files import HOSTS_FOLDER, read_host

_BEAT_SECONDS = 1.0
# A host whose file has not changed for this long is reported as silent. On a network file system,
# changes may become visible with a delay of half a minute.
_SILENT_SECONDS = 60.0
# How long to wait for all hosts to be ready; torchrun waits as long for a static rendezvous.
_MAX_WAIT_SECONDS = 900.0
_POLL_SECONDS = 0.2
# Print a message after waiting this long for other hosts.
_ANNOUNCE_AFTER_SECONDS = 10.0
# Facts about an ended attempt, which are kept in the file in later states.
_ENDED_KEYS = ("cause", "title", "follows")
_FINAL_STATES = ("stopped", "done")

_NODE_COUNT_OPTIONS = ("--nnodes", "--num-machines")
_NODE_RANK_OPTIONS = ("--node-rank", "--machine-rank")

HostState = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostPosition:
    """The number of this host, counted from 0, and the number of hosts."""

    number: int = 0
    count: int = 1


def find_host(command: Sequence[str], environment: Mapping[str, str]) -> HostPosition:
    """Return the position of this host, read from the options of a launcher such as torchrun.

    Without such options, the run has a single host.
    """
    count = _read_option(command, environment, _NODE_COUNT_OPTIONS, "PET_NNODES")
    number = _read_option(command, environment, _NODE_RANK_OPTIONS, "PET_NODE_RANK")
    if count is None or number is None or number >= count:
        return HostPosition()
    return HostPosition(number, count)


def _read_option(
    command: Sequence[str], environment: Mapping[str, str], names: Sequence[str], variable: str
) -> int | None:
    """Return the value of a launcher option, or else of its environment variable.

    The result is None if neither contains a plain number.
    """
    text = environment.get(variable, "")
    following_words = [*command[1:], ""]
    for word, next_word in zip(command, following_words, strict=True):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") in names:
            text = value if equals else next_word
    return int(text) if text.isascii() and text.isdigit() else None


class Hosts:
    """Exchanges state with the other hosts of the run, through the shared run directory.

    Args:
        run_path: The run directory, which all hosts share.
        position: The position of this host.

    Raises:
        RunDirectoryError: H722 if the directory cannot be written.
    """

    def __init__(self, run_path: Path, position: HostPosition) -> None:
        self._folder = run_path / HOSTS_FOLDER
        self._number = position.number
        self._count = position.count
        self._own: HostState = {"state": "coming"}
        self._beats = 0
        self._last_beat_at = 0.0
        # Contents of the other hosts' files when this supervisor first read them, which may be left
        # over from an earlier run.
        self._initial: dict[int, HostState] = {}
        # The current state of each other host, and when its file last changed, on this host's
        # monotonic clock.
        self._current: dict[int, HostState] = {}
        self._changed_at: dict[int, float] = {}
        self._silent: set[int] = set()
        # Numbers of the hosts that are known to have joined the current attempt.
        self._joined: set[int] = set()
        try:
            make_folder(run_path, HOSTS_FOLDER)
            self._write()
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {run_path} cannot be written ({error.strerror or error})",
                limit="the hosts of a run exchange files there",
                fix="pass a --run-dir on a disk that all hosts share.",
                rule="H722",
            ) from error

    # --- starting an attempt ---

    def begin(self, wait: Callable[[float], bool], say: Callable[[str], None]) -> str | None:
        """Wait until all hosts are ready, then start an attempt together with them.

        Args:
            wait: Sleeps for a number of seconds. Returns False if a signal requests the end of the
                run.
            say: Prints a message.

        Returns:
            None if the attempt has started; otherwise the reason why it cannot start.
        """
        ticket = f"{os.getpid()}-{time.time_ns()}"
        last_go = self._own.get("go")
        self._publish("ready", ticket=ticket, **self._own_facts(*_ENDED_KEYS))
        other_hosts = {str(number) for number in range(self._count) if number != self._number}
        began_at = time.monotonic()
        was_announced = False
        while True:
            others = self._read_others()
            ready = self._ready_tickets(others)
            if self._join(others, ready, ticket):
                return None
            obstacle = self._find_obstacle(others, last_go)
            if obstacle is not None:
                return obstacle
            waited_seconds = time.monotonic() - began_at
            missing = ", ".join(sorted(other_hosts - ready.keys()))
            if waited_seconds > _MAX_WAIT_SECONDS:
                return f"hosts {missing} were not ready after {waited_seconds:.0f} s"
            if waited_seconds > _ANNOUNCE_AFTER_SECONDS and not was_announced:
                was_announced = True
                say(f"waiting up to {_MAX_WAIT_SECONDS / 60:.0f} minutes for hosts {missing}")
            if not wait(_POLL_SECONDS):
                return "a signal requested the end of the run"
            self._beat()

    def _ready_tickets(self, others: Mapping[int, HostState]) -> dict[str, str]:
        """Return the tickets of the other hosts that are ready to start, keyed by host number."""
        return {
            str(number): host["ticket"]
            for number, host in others.items()
            if host["state"] == "ready" and host.get("ticket") and not self._is_silent(number)
        }

    def _join(self, others: Mapping[int, HostState], ready: Mapping[str, str], ticket: str) -> bool:
        """Join the attempt if its start signal has been given; return whether this host joined.

        The start signal is the entry ``go`` of host 0, which contains the ticket of every
        participating host. On host 0, this method gives the signal once all hosts are ready.
        """
        if self._number == 0:
            if len(ready) < self._count - 1:
                return False
            go = {**ready, "0": ticket}
            # Host 0 knows that all other hosts take part. The other hosts so far know it only of
            # host 0.
            self._joined = {int(number) for number in ready}
        else:
            go = others.get(0, {}).get("go") or {}
            if go.get(str(self._number)) != ticket:
                return False
            self._joined = {0}
        self._publish("running", ticket=ticket, go=go)
        return True

    def _find_obstacle(
        self, others: Mapping[int, HostState], last_go: Mapping[str, str] | None
    ) -> str | None:
        """Return a reason why the hosts can never start together, or None if there is none."""
        for number, host in others.items():
            count = host.get("count")
            if count != self._count:
                return (
                    f"host {number} was started for {count} hosts, but this host for {self._count}"
                )
            took_part = last_go is not None and host.get("go") == last_go
            if host["state"] in _FINAL_STATES and took_part:
                reasons = [host.get("title"), host.get("why", "")]
                reason = "; ".join(str(reason) for reason in reasons if reason)
                return f"host {number} has ended its run: {reason}"
        return None

    # --- during an attempt, and after it ---

    def find_failure(self, say: Callable[[str], None]) -> str | None:
        """Return why another host ended this attempt, or None if all hosts are still running it.

        The files are checked at most once a second. `say` prints a message if a host has gone
        silent.
        """
        if not self._beat():
            return None
        go = self._own.get("go", {})
        for number, host in self._read_others().items():
            if self._has_ended(number, host, go):
                reason = host.get("title") or host.get("why") or "started again"
                return f"host {number} has ended: {reason}"
            self._report_silence(number, say)
        return None

    def _has_ended(self, number: int, host: HostState, go: Mapping[str, str]) -> bool:
        """Return whether a host has left the attempt that `go` started."""
        is_in_this_attempt = host.get("ticket") == go.get(str(number))
        if is_in_this_attempt:
            self._joined.add(number)
            return host["state"] in ("ended", "stopped")
        # A different ticket means either that the host has left the attempt, or that its joining
        # has not been seen yet.
        return number in self._joined

    def _report_silence(self, number: int, say: Callable[[str], None]) -> None:
        if not self._is_silent(number):
            self._silent.discard(number)
        elif number not in self._silent:
            self._silent.add(number)
            say(f"host {number} has not responded for {_SILENT_SECONDS:.0f} s")

    def publish_ended(self, *, cause: str, title: str, follows: bool) -> None:
        """Tell the other hosts that the attempt has ended on this host.

        Args:
            cause: Id of the cause in the verdict.
            title: Title of the verdict.
            follows: Whether the attempt ended here only because it had ended on another host.
        """
        attempt = self._own_facts("ticket", "go")
        self._publish("ended", cause=cause, title=title, follows=follows, **attempt)

    def publish_stopped(self, why: str, *, succeeded: bool) -> None:
        """Tell the other hosts that this host will not start another attempt."""
        facts = self._own_facts("ticket", "go", *_ENDED_KEYS)
        self._publish("done" if succeeded else "stopped", why=why, **facts)

    # --- files ---

    def _own_facts(self, *keys: str) -> HostState:
        return {key: self._own[key] for key in keys if key in self._own}

    def _publish(self, state: str, **facts: Any) -> None:
        self._own = {"state": state, **facts}
        # If the disk is full or temporarily unavailable, this host appears silent to the others.
        with suppress(OSError):
            self._write()

    def _beat(self) -> bool:
        """Rewrite this host's file once a second, to show that the host is alive.

        Returns:
            Whether the file was due to be rewritten.
        """
        now = time.monotonic()
        if now - self._last_beat_at < _BEAT_SECONDS:
            return False
        self._last_beat_at = now
        with suppress(OSError):
            self._write()
        return True

    def _write(self) -> None:
        self._beats += 1
        beat = f"{os.getpid()}-{self._beats}"
        content = {**self._own, "count": self._count, "beat": beat}
        swap_in(self._folder / f"{self._number}.json", json.dumps(content).encode())

    def _is_silent(self, number: int) -> bool:
        return time.monotonic() - self._changed_at[number] > _SILENT_SECONDS

    def _read_others(self) -> dict[int, HostState]:
        """Return the states of the other hosts, keyed by host number.

        A host is included once its file has changed since this supervisor first read it.
        """
        for number in range(self._count):
            if number == self._number:
                continue
            host = read_host(self._folder / f"{number}.json")
            if host is None:
                continue
            initial = self._initial.setdefault(number, host)
            if host != self._current.get(number, initial):
                self._current[number] = host
                self._changed_at[number] = time.monotonic()
        return dict(self._current)
