"""Decide whether a resumed script may skip a loop, from the way in which the loop has ended."""

from __future__ import annotations

from types import FrameType

from holdfast.guard.unchanged.loops.bytecode import leaves_like_an_exhausted_loop
from holdfast.guard.unchanged.loops.loop import Loop
from holdfast.guard.unchanged.loops.places import loop_frame


def continues_as_after_exhaustion(
    loop: Loop, frame: FrameType | None, *, is_exhausted: bool
) -> bool:
    """Return whether the code that runs after a loop is the code that follows an exhausted loop.

    A resumed script exhausts the loop at once, so only then does it run the same code.

    Args:
        loop: The loop, which has ended.
        frame: The frame in which the iterator was exhausted or freed. None if Python shuts down.
        is_exhausted: Whether the loader had no more batches.
    """
    if is_exhausted:
        return True
    assert loop.place is not None
    frame_of_loop = None if frame is None else loop_frame(frame, loop.place)
    if frame_of_loop is None or loop.has_failed:
        return False
    if frame_of_loop is not frame and frame_of_loop.f_lasti == loop.place.offset:
        # A generator around the loader has ended, perhaps with an error.
        return False
    return leaves_like_an_exhausted_loop(loop.place.code, loop.place.offset, frame_of_loop.f_lasti)
