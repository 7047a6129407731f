"""Builds a feature cache that is killed; started by ``test_feature_cache``.

Argument: JSON with ``path``, ``workers`` and what is to go wrong. Prints one JSON object at its
end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from recipes.features.cache import FeatureCache

from holdfast.core.errors import LoaderError
from holdfast.testing import fill_disk

ITEMS = 120
REQUEST: dict[str, Any] = json.loads(sys.argv[1])


class Samples:
    """Samples of random length, read slowly.

    What goes wrong lies here, so the function stays the same.
    """

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(REQUEST.get("seconds", 0.0))
        if "pids" in REQUEST:
            (Path(REQUEST["pids"]) / str(os.getpid())).touch()
        if index == REQUEST.get("kill_worker_at") and _first_time(REQUEST.get("once")):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == REQUEST.get("hang_at"):
            signal.pause()
        if index == REQUEST.get("fill_at"):
            fill_disk(Path(REQUEST["filler"]))
        return torch.randn(random.randrange(1, 400), 8)


def _first_time(file: str | None) -> bool:
    if file is None:
        return True
    try:
        Path(file).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def double(sample: torch.Tensor) -> torch.Tensor:
    return 2 * sample


def main() -> None:
    answer: dict[str, Any] = {}
    try:
        with FeatureCache.build(
            Samples(),
            double,
            REQUEST["path"],
            version=1,
            num_workers=REQUEST.get("workers", 2),
            progress=False,
        ) as cache:
            answer["items"] = len(list(cache))  # each is verified
    except LoaderError as error:
        answer = {"rule": error.rule, "error": str(error)}
    if "filler" in REQUEST:
        Path(REQUEST["filler"]).unlink(missing_ok=True)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
