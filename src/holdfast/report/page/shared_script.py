"""Share one copy of plotly.js between the pages of a folder of runs.

plotly.js takes up 4.6 MiB, which is far more than everything else on a page. A page inside a folder
of runs therefore loads it from a file in that folder. A page elsewhere contains it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from holdfast.core.durable import replace_file
from holdfast.core.files import SHARED
from holdfast.report.page.offline_page import plotly_script


def share_script(page: Path, folders: Sequence[Path]) -> tuple[str, ...]:
    """Write plotly.js into the first folder that can be written, unless it is already there.

    Args:
        page: Path of the page that will load the script.
        folders: The folders to try, in this order.

    Returns:
        The relative addresses at which the page looks for the script: that of the written file, and
        then the page's own folder, because people copy both files into one. Empty if the script
        could not be written.

    Raises:
        PolicyError: H742 if plotly is not installed.
    """
    source = plotly_script().encode()
    name = f"plotly-{_version()}.min.js"
    for folder in folders:
        if _is_written(folder / name, source):
            address = os.path.relpath(folder / name, page.parent)
            return tuple(dict.fromkeys([quote(address), quote(name)]))
    return ()


def _is_written(path: Path, source: bytes) -> bool:
    """Return whether a file has this content, after trying to write it if it does not."""
    try:
        if path.is_file() and path.read_bytes() == source:
            return True
        replace_file(path, source, SHARED)
    except OSError:
        return False
    return True


def _version() -> str:
    """Return the version of plotly.js, which differs from that of the package."""
    from plotly.offline import get_plotlyjs_version

    version: str = get_plotlyjs_version()
    return version
