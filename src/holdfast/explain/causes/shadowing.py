"""Find user files that Python imported in place of a module of the same name.

The intended module is part of Python's standard library or of an installed package.
"""

from __future__ import annotations

import itertools
import re
from pathlib import PurePath

from holdfast.explain.evidence import Frame, Statement, is_user_code

# The two Python error messages that name the shadowing file.
_NAMED_FILE = re.compile(
    r"\bcannot import name .{1,300}\(([^()]{1,300}\.py)\)|\bconsider renaming '([^']+)' since"
)


def find_shadowing_file(raised: Statement) -> str:
    """Return the file that shadows a module, or "" if there is none.

    The file is in the script's directory. It is recognized because a library imported it in place
    of the intended module, or because it imported itself.
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
    """Return the frames with a real file, plus a frame for the file that the message names, if any.

    The added frame comes last, because the named file was imported by the innermost frame.
    """
    frames = [frame for frame in raised.frames if not frame.file.startswith("<")]
    match = _NAMED_FILE.search(raised.text)
    if match is not None:
        frames.append(Frame(file=match[1] or match[2], line=0, function="<module>"))
    return frames
