"""Several hosts that run one training: they begin each attempt together, and end it together.

Each host's supervisor keeps one small file in a folder that all of them see, and reads those of the
others once a second. Host 0 gives the word to begin when all are ready. Without it a host that is
quick to start again meets the store of the attempt that is still ending elsewhere, and both then
wait for ever.

Clocks of hosts differ, so no time is compared: who is alive is seen by its file changing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import make_folder, swap_in
from holdfast.recorder.run_files import HOSTS_FOLDER, read_host

_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 60.0  # a network disk may show another host's file half a minute late
_MOST_WAIT_SECONDS = 900.0  # as torchrun waits for nodes of a static rendezvous


def find_host(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of this host and how many there are, as the launcher's options say.

    (0, 1) if they do not.
    """
    count = _option(command, environment, ("--nnodes", "--num-machines"), "PET_NNODES")
    number = _option(command, environment, ("--node-rank", "--machine-rank"), "PET_NODE_RANK")
    return (0, 1) if count is None or number is None or number >= count else (number, count)


def _option(
    command: Sequence[str], environment: Mapping[str, str], names: Sequence[str], variable: str
) -> int | None:
    found = environment.get(variable, "")
    for word, after in zip(command, [*command[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") in names:
            found = value if equals else after
    return int(found) if found.isascii() and found.isdigit() else None


class Hosts:
    """What this host tells the others, in the run directory that all share, and what they tell
    (H722: unwritable).
    """

    def __init__(self, run: Path, number: int, count: int) -> None:
        self._folder = run / HOSTS_FOLDER
        self._number, self._count = number, count
        self._own: dict[str, Any] = {"state": "coming"}
        self._beats = 0
        self._last_beat = 0.0
        self._first: dict[int, dict[str, Any]] = {}  # what was there before we came
        # What each says, and since when
        self._changed: dict[int, tuple[dict[str, Any], float]] = {}
        self._silent: set[int] = set()
        self._joined: set[int] = set()  # who was seen to make the newest attempt
        try:
            make_folder(run, HOSTS_FOLDER)
            self._write()
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {run} cannot be written ({error.strerror or error})",
                limit="the hosts of one training exchange files there",
                fix="pass a --run-dir on a disk that all hosts share.",
                rule="H722",
            ) from error

    def begin(self, wait: Callable[[float], bool], say: Callable[[str], None]) -> str | None:
        """Wait until all hosts are ready, and begin; return None, or why there is nothing to begin.

        `wait` sleeps so many seconds, and returns false if a signal asks to end; `say` prints a
        line.
        """
        ticket = f"{os.getpid()}-{time.time_ns()}"
        before = self._own.get("go")  # what all began together the last time
        self._say("ready", ticket=ticket, **self._of("cause", "title", "follows"))
        began, told = time.monotonic(), False
        while True:
            others = self._others()
            ready = {
                str(number): its["ticket"]
                for number, its in others.items()
                if its["state"] == "ready" and its.get("ticket") and not self._is_silent(number)
            }
            go = others.get(0, {}).get("go") or {}
            if self._number == 0 and len(ready) == self._count - 1:
                go = {**ready, "0": ticket}
            if go.get(str(self._number)) == ticket:
                self._joined = {0} if self._number else set(map(int, ready))
                self._say("running", ticket=ticket, go=go)
                return None
            for number, its in others.items():
                if (count := its.get("count")) != self._count:
                    return f"host {number} is told of {count} hosts, and this one of {self._count}"
                if (
                    its["state"] in ("stopped", "done")
                    and before is not None
                    and its.get("go") == before
                ):
                    title = its.get("title") or ""
                    return (
                        f"host {number} has ended for good:"
                        f" {title}{title and '; '}{its.get('why', '')}"
                    )
            waited = time.monotonic() - began
            missing = sorted(
                {str(number) for number in range(self._count)} - set(ready) - {str(self._number)}
            )
            if waited > _MOST_WAIT_SECONDS:
                return f"hosts {', '.join(missing)} were not ready after {waited:.0f} s"
            if waited > 10 and not told:
                told = True
                say(
                    f"waiting for hosts {', '.join(missing)}, for {_MOST_WAIT_SECONDS / 60:.0f}"
                    " minutes at most"
                )
            if not wait(0.2):
                return "a signal asked to end"
            self._beat()

    def why_end(self, say: Callable[[str], None]) -> str | None:
        """Return why this attempt cannot go on: another host has ended it; None while all go on."""
        if not self._beat():
            return None
        go = self._own.get("go", {})
        for number, its in self._others().items():
            same = its.get("ticket") == go.get(str(number))
            # Else seen late
            over = its["state"] in ("ended", "stopped") if same else number in self._joined
            if same:
                self._joined.add(number)
            if over:
                return (
                    f"host {number} has ended:"
                    f" {its.get('title') or its.get('why') or 'started anew'}"
                )
            silent = self._is_silent(number)
            if silent and number not in self._silent:
                say(f"host {number} has not been heard of for {_SILENT_SECONDS:.0f} s")
            (self._silent.add if silent else self._silent.discard)(number)
        return None

    def ended(self, *, cause: str, title: str, follows: bool) -> None:
        """Tell that the attempt has ended here, and why.

        `follows`: only because it had ended elsewhere.
        """
        self._say("ended", cause=cause, title=title, follows=follows, **self._of("ticket", "go"))

    def stopped(self, why: str, *, well: bool) -> None:
        """Tell that nothing is started here any more."""
        kept = self._of("ticket", "go", "cause", "title", "follows")
        self._say("done" if well else "stopped", why=why, **kept)

    def _of(self, *keys: str) -> dict[str, Any]:
        return {key: self._own[key] for key in keys if key in self._own}

    def _say(self, state: str, **facts: Any) -> None:
        self._own = {"state": state, **facts}
        # A disk that is full or away for a while: the others say that this host is silent
        with suppress(OSError):
            self._write()

    def _beat(self) -> bool:
        """Let the others see that this host lives; return whether it was time to."""
        if (now := time.monotonic()) - self._last_beat < _BEAT_SECONDS:
            return False
        self._last_beat = now
        with suppress(OSError):
            self._write()
        return True

    def _is_silent(self, number: int) -> bool:
        return time.monotonic() - self._changed[number][1] > _SILENT_SECONDS

    def _write(self) -> None:
        self._beats += 1
        says = {**self._own, "count": self._count, "beat": f"{os.getpid()}-{self._beats}"}
        swap_in(self._folder / f"{self._number}.json", json.dumps(says).encode())

    def _others(self) -> dict[int, dict[str, Any]]:
        """Return what the others say; not of one whose file has not changed since we came."""
        for number in set(range(self._count)) - {self._number}:
            its = read_host(self._folder / f"{number}.json")
            if its is None:
                continue
            before = self._changed.get(number, (self._first.setdefault(number, its), 0.0))
            if its != before[0]:
                self._changed[number] = its, time.monotonic()
        return {number: its for number, (its, _) in self._changed.items()}
