"""Recognize the phase of training from the stack of a process that does not record its phase."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from holdfast.explain.evidence import Frame, is_user_code
from holdfast.explain.hangs.process_samples import ExaminedProcess

WORKER_PHASE = "makes batches"
_UNKNOWN_PHASE = "phase not known"
_OWN_CODE_PHASE = "in code of its own"
# Regular expressions that recognize a phase from the main thread's stack. The first match wins.
_PHASES = {
    WORKER_PHASE: r":_worker_loop$",
    "data wait": r"/torch/utils/data/dataloader\.py:|/holdfast/loader/",
    "saving": (
        r"/torch/serialization\.py:|/torch/distributed/checkpoint/|/safetensors/|/holdfast/checkpoint/"
    ),
    "optimizer": r"/torch/optim/",
    "forward/backward": r"/torch/(?:autograd|nn)/|/torch/_tensor\.py:(?:\w+\.)?backward$",
}
IMPORT_FILE = "<frozen importlib"


def find_phase(process: ExaminedProcess) -> str:
    """Return the phase of a process, recognized from the stack of its main thread."""
    frames = process.newest.main_thread.frames
    if not frames:
        return _UNKNOWN_PHASE
    if _is_importing(frames):
        return "starting"
    places = [f"{frame.file}:{frame.function}" for frame in frames]
    for phase, pattern in _PHASES.items():
        if any(re.search(pattern, place) for place in places):
            return phase
    return _OWN_CODE_PHASE


def _is_importing(frames: Sequence[Frame]) -> bool:
    """Return whether the script is executing an import statement."""
    called_by_script = takewhile(lambda frame: not is_user_code(frame), reversed(frames))
    return any(IMPORT_FILE in frame.file for frame in called_by_script)
