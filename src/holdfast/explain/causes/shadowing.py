"""Find user files that Python imported in place of a standard or library module."""

from __future__ import annotations

import itertools
import re
from pathlib import PurePath

from holdfast.explain.evidence import Frame, Statement, is_user_code

# The two messages in which Python itself names the shadowing file.
_NAMED_FILE = re.compile(
    r"\bcannot import name .{1,300}\(([^()]{1,300}\.py)\)|\bconsider renaming '([^']+)' since"
)


def find_shadowing_file(raised: Statement) -> str:
    """Return the file in the script's folder that shadows a module, or "" if there is none.

    Either a library imported this file instead of the module it wanted, or the file imported
    itself.
    """
    frames = _importing_frames(raised)
    for importer, imported in itertools.pairwise(frames):
        if importer.function != "<module>" or imported.function != "<module>":
            continue
        is_beside_script = PurePath(imported.file).parent == PurePath(frames[0].file).parent
        if not is_user_code(imported) or not is_beside_script:
            continue
        if importer.file == imported.file or not is_user_code(importer):
            return imported.file
    return ""


def _importing_frames(raised: Statement) -> list[Frame]:
    """Return the frames that have a file, followed by a frame for the file named in the message."""
    frames = [frame for frame in raised.frames if not frame.file.startswith("<")]
    match = _NAMED_FILE.search(raised.text)
    if match is not None:
        frames.append(Frame(file=match[1] or match[2], line=0, function="<module>"))
    return frames
