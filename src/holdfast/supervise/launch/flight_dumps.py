"""Keep the dumps of torch's flight recorder in the run directory, where ``explain`` reads them.

After a collective timeout, each rank writes its newest collectives to a file. By default, that file
is in the user's cache directory, where the next run overwrites it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.core.files import make_folder
from holdfast.recorder.run_files import FLIGHT_FOLDER, flight_prefix

# The variables that say where torch writes the dumps, the newer one first. The rank is appended.
_FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# The largest dump that is copied, and the number of dumps.
_MAX_BYTES = 64 << 20
_MAX_FILES = 4096


def flight_variables(
    environment: Mapping[str, str], run_path: Path, attempt: int
) -> dict[str, str]:
    """Return the variables with which torch writes its dumps to the run directory.

    The result is empty if the user has chosen another place, or if the directory cannot be made.
    """
    if any(name in environment for name in _FILE_VARIABLES):
        return {}
    try:
        folder = make_folder(run_path.absolute(), FLIGHT_FOLDER)
    except OSError:
        # Without its dumps, the run is still recorded.
        return {}
    return {_FILE_VARIABLES[0]: str(folder / flight_prefix(attempt))}


def keep_dumps(
    environment: Mapping[str, str], run_path: Path, attempt: int, *, since: float
) -> None:
    """Keep the dumps of an attempt that has ended in the run directory.

    Dumps at a place that the user has chosen are copied. If there are none, no directory is kept.

    Args:
        environment: The environment of the supervisor.
        run_path: The run directory.
        attempt: Number of the attempt.
        since: The Unix time at which the attempt began. Older dumps are those of other runs.
    """
    prefix = next((environment[name] for name in _FILE_VARIABLES if environment.get(name)), "")
    if prefix:
        _copy_dumps(Path(prefix), run_path, attempt, since)
    with suppress(OSError):
        # This fails if the directory holds dumps.
        (run_path / FLIGHT_FOLDER).rmdir()


def _copy_dumps(place: Path, run_path: Path, attempt: int, since: float) -> None:
    """Copy the dumps whose paths begin with `place` and end with a rank."""
    pattern = re.compile(re.escape(place.name) + r"(\d{1,7}(?:\.json)?)")
    # A dump that cannot be copied is missing in the verdict, which is no reason to fail.
    with suppress(OSError):
        for file in sorted(place.parent.iterdir())[:_MAX_FILES]:
            match = pattern.fullmatch(file.name)
            if match is not None and _is_dump_of_attempt(file, since):
                folder = make_folder(run_path, FLIGHT_FOLDER)
                shutil.copyfile(file, folder / f"{flight_prefix(attempt)}{match[1]}")


def _is_dump_of_attempt(file: Path, since: float) -> bool:
    status = file.stat()
    return file.is_file() and status.st_mtime >= since and status.st_size <= _MAX_BYTES
