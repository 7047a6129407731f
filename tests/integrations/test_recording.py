"""What a callback's recording says of its end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.core.events import Event
from holdfast.integrations.recording import Recording
from holdfast.recorder.reader import read_events


def events_after(run_dir: Path, error: BaseException | None) -> list[Event]:
    recording = Recording({"diagnose": False}, run_dir, instead="the mixin")
    recording.open(run_dir, by="a test", world_size=1, global_step=3, model=torch.nn.Linear(1, 1))
    recording.close(error)
    (process,) = (run_dir / "recorder").iterdir()
    return read_events(process)


@pytest.mark.parametrize("error", [None, ValueError("a mistake in the training loop")])
def test_a_training_that_an_error_ends_is_not_told_as_finished(tmp_path: Path, error: ValueError | None) -> None:
    """The last word is the error with its message, also where a framework hands over one that is not in flight."""
    last = events_after(tmp_path, error)[-1]
    if error is None:
        assert (last.kind, last.data["how"]) == ("closed", "finished")
    else:
        assert (last.kind, last.data["message"]) == ("left_by_exception", "a mistake in the training loop")
