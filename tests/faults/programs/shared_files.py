"""Read an epoch by workers that share tensors through files, and print the pids of those that keep these files.

python shared_files.py START_METHOD
"""

import os
import sys
from pathlib import Path

from holdfast.loader.loader import DataLoader

_MARK = "HOLDFAST_TEST_SHARED_FILES"


def main(method: str) -> None:
    os.environ[_MARK] = mark = str(os.getpid())
    loader = DataLoader(list(range(64)), batch_size=4, num_workers=4, multiprocessing_context=method)
    loader._healer.crew.share_by_file = True
    kept = list(loader)  # their files have a keeper for as long
    assert [int(each) for batch in kept for each in batch] == list(range(64))
    print(*[process.name for process in Path("/proc").iterdir() if _keeps(process, mark)])


def _keeps(process: Path, mark: str) -> bool:
    try:
        name, environment = ((process / file).read_text() for file in ("comm", "environ"))
    except OSError:
        return False
    return name.startswith("torch_shm") and f"{_MARK}={mark}\0" in environment


if __name__ == "__main__":
    main(sys.argv[1])
