"""Requests to a process that trains: only the process that is asked gets them, and only once."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.run_requests import Answer, RequestFolder

HOLDER = "process 4711 on node3"


@pytest.fixture
def folder(tmp_path: Path) -> RequestFolder:
    requests = RequestFolder(tmp_path)
    requests.clear()
    return requests


def test_a_request_is_taken_once_and_answered(folder):
    """The command reads the answer, and removes it."""
    request = folder.send("save", HOLDER)
    answer = Answer(checkpoint="000002-step00000007", global_step=7, problem=None)

    assert folder.take(HOLDER) == [request]
    assert folder.take(HOLDER) == []
    assert folder.answer_to(request) is None
    folder.answer(request, answer)
    assert folder.answer_to(request) == answer
    assert not folder.withdraw(request)
    folder.remove(request)
    assert folder.answer_to(request) is None


def test_a_request_to_another_process_is_discarded(folder):
    """The process that was asked has ended, so nobody must carry out the request."""
    folder.send("stop", "process 4711 on node2")

    assert folder.take(HOLDER) == []
    assert folder.take("process 4711 on node2") == []


def test_a_withdrawn_request_is_not_taken(folder):
    """The command has told its user that nothing will happen."""
    request = folder.send("stop", HOLDER)

    assert folder.withdraw(request)
    assert folder.take(HOLDER) == []


@pytest.mark.parametrize("contents", ["", "[]", '{"action": "rm"}', "{", '{"action": ["save"]}'])
def test_a_file_that_is_no_request_is_discarded(folder, tmp_path, contents):
    """It neither stops a run nor ends it with an error."""
    path = tmp_path / "requests" / "some.request"
    path.write_text(contents)

    assert folder.take(HOLDER) == []
    assert not path.exists()


def test_what_earlier_processes_have_left_is_removed(folder):
    """A later process may have the same PID on a host of the same name, as in a container."""
    request = folder.send("stop", HOLDER)
    folder.answer(request, Answer(checkpoint=None, global_step=None, problem="none"))
    folder.clear()

    assert folder.take(HOLDER) == []
    assert folder.answer_to(request) is None


def test_without_the_folder_nobody_can_be_asked(tmp_path):
    """A process that could not create it takes no requests, and the command must say so."""
    requests = RequestFolder(tmp_path)

    assert requests.take(HOLDER) == []
    with pytest.raises(FileNotFoundError):
        requests.send("save", HOLDER)
