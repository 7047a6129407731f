"""Requests to the process that trains in a run directory, and its answers, as files.

`holdfast save` and `holdfast stop` write a request. The process that holds the run directory takes
it at its next boundary, and writes an answer once the request is carried out:

requests/<id>.request   what to do, who asks, and which process is asked
requests/<id>.answer    the outcome

A request names the process that it is meant for, as the lock of the run directory does. Any other
process that finds the request removes it without carrying it out. The command removes the request
and the answer when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from holdfast.core.durable import replace_file
from holdfast.core.files import make_folder, read_file, remove

Action: TypeAlias = Literal["save", "stop"]

# The reason of a stop that a command has requested.
REQUESTED_FROM_OUTSIDE = "requested from outside"

_FOLDER = "requests"
_REQUEST = ".request"
_ANSWER = ".answer"
# The largest size of a request or an answer. They contain a few names.
_MOST_BYTES = 4096
_DAMAGED = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the process that holds a run directory."""

    # The unique id of the request, which is part of the names of its files.
    id: str
    action: Action
    # The process that asks, such as "process 812 on login1".
    sender: str
    # The process that is asked, as its lock names it.
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of a request."""

    # The checkpoint that was saved or, after a stop, the newest one. None if there is none.
    checkpoint: str | None
    global_step: int | None
    # Why the state was not saved. None if it was saved, or if the run saves nothing anyway.
    problem: str | None


class RequestFolder:
    """The requests to the process that holds a run directory, and its answers.

    Args:
        run_dir: The run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / _FOLDER

    # --- in the process that trains

    def clear(self) -> None:
        """Create the folder, and remove what was left by earlier processes.

        Raises:
            OSError: If the folder cannot be created.
        """
        make_folder(self._run_dir, _FOLDER)
        for path in self._path.iterdir():
            remove(path)

    def take(self, holder: str) -> list[Request]:
        """Remove all requests, and return those that are meant for a process.

        A request that cannot be removed is not returned, so that none is carried out twice.

        Args:
            holder: The process.
        """
        # The folder is listed because, on a network file system, `os.stat` may return attributes
        # that are up to a minute old. Opening a folder makes the client ask the server.
        try:
            paths = list(self._path.iterdir())
        except OSError:
            # The run directory was removed or does not respond.
            return []
        requests = []
        for path in paths:
            if path.suffix == _REQUEST:
                request = self._take(path)
                if request is not None and request.holder == holder:
                    requests.append(request)
        return requests

    def _take(self, path: Path) -> Request | None:
        """Remove a request, and return it unless it is damaged or could not be removed."""
        try:
            contents = read_file(path, _MOST_BYTES)
            path.unlink()
        except OSError:
            # The command may have withdrawn the request at this moment.
            return None
        try:
            values = json.loads(contents)
            request = Request(
                id=path.stem,
                action=values["action"],
                sender=str(values["sender"]),
                holder=values["holder"],
            )
        except _DAMAGED:
            return None
        return request if request.action in get_args(Action) else None

    def answer(self, request: Request, answer: Answer) -> None:
        """Write the answer to a request.

        If it cannot be written, for example because the disk is full, the command that waits for it
        reports that there was no answer in time.
        """
        with contextlib.suppress(OSError):
            replace_file(self._path_of(request, _ANSWER), json.dumps(asdict(answer)).encode())

    # --- in the command

    def send(self, action: Action, holder: str) -> Request:
        """Write a request.

        Args:
            action: What to do.
            holder: The process that is asked.

        Raises:
            OSError: If the request cannot be written. A `FileNotFoundError` means that the process
                does not take requests.
        """
        request = Request(
            id=uuid.uuid4().hex,
            action=action,
            sender=f"process {os.getpid()} on {socket.gethostname()}",
            holder=holder,
        )
        replace_file(self._path_of(request, _REQUEST), json.dumps(asdict(request)).encode())
        return request

    def answer_to(self, request: Request) -> Answer | None:
        """Return the answer to a request, or None if there is none yet."""
        try:
            values: dict[str, Any] = json.loads(
                read_file(self._path_of(request, _ANSWER), _MOST_BYTES)
            )
            return Answer(**values)
        except (OSError, *_DAMAGED):
            return None

    def withdraw(self, request: Request) -> bool:
        """Remove a request, unless it was taken already.

        Returns:
            Whether the request was removed, so that no process will carry it out.
        """
        try:
            self._path_of(request, _REQUEST).unlink()
        except OSError:
            return False
        return True

    def remove(self, request: Request) -> None:
        """Remove a request and its answer, if they exist."""
        self.withdraw(request)
        remove(self._path_of(request, _ANSWER))

    def _path_of(self, request: Request, suffix: str) -> Path:
        return self._path / f"{request.id}{suffix}"
