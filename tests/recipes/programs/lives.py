"""Lives of a recipe, each as ``python -m recipes.NAME OPTIONS`` in a copy of one process that has imported it once.

    python lives.py NAME '[{"name": ..., "options": [...], "log": ..., ...}, ...]'

What may be done to a life: ``measure`` (find out what memory the n-th step takes), ``limit`` (let the n-th step have
only a share of what it takes in an earlier life), ``die`` (SIGKILL so many seconds after the n-th step), ``bad`` (a
sample that cannot be read), ``killing`` (one that kills the worker that reads it first, unless ``mark`` is there).
One line of JSON is printed for each.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.testing import memory_limited

torch.set_num_threads(1)
_OF_EVERY_LIFE = ("torch._dynamo", "plotly.offline")  # take seconds where each life imports them anew
_LAZY = {"pegasus": ("DataCollatorForSeq2Seq", "PegasusForConditionalGeneration", "PegasusTokenizer")}
_step, _init = holdfast.Guard.step, holdfast.Guard.__init__


class Hurting(torch.utils.data.Dataset):
    """A recipe's own dataset with a sample that cannot be read, or that kills its worker, once."""

    def __init__(self, samples: Any, bad: int | None, killing: int | None, mark: Path) -> None:
        self._samples, self._bad, self._killing, self._mark = samples, bad, killing, mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_samples"], name)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        if index == self._bad:
            raise ValueError("damaged on purpose")
        if index == self._killing and torch.utils.data.get_worker_info() is not None and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._samples[index]


def peak_bytes() -> int:
    """Return the most memory that this process has held since it was last asked to forget."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def live(recipe: str, life: dict[str, Any]) -> None:
    """Run the recipe with something done to it."""
    calls = 0

    def step(guard: Any, *args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if life.get("limit", [0])[0] == calls:
            with memory_limited(life["limit"][1]):
                return _step(guard, *args, **named)
        if life.get("measure") == calls:
            Path("/proc/self/clear_refs").write_text("5")
            before = peak_bytes()
            result = _step(guard, *args, **named)
            Path(life["log"]).with_suffix(".bytes").write_text(str(peak_bytes() - before))
            return result
        result = _step(guard, *args, **named)
        if life.get("die", [0])[0] == calls:  # a thread that is waited for: the life cannot end before
            threading.Timer(life["die"][1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        return result

    def init(guard: Any, *args: Any, **named: Any) -> None:
        if "bad" in life or "killing" in life:
            mark = Path(life.get("mark", os.devnull))
            hurting = Hurting(named["loader"].dataset, life.get("bad"), life.get("killing"), mark)
            object.__setattr__(named["loader"], "dataset", hurting)
        _init(guard, *args, **named)

    holdfast.Guard.step, holdfast.Guard.__init__ = step, init  # type: ignore[method-assign]
    sys.argv = [recipe, *life["options"]]
    runpy.run_module(f"recipes.{recipe}", run_name="__main__", alter_sys=True)


def main(recipe: str, lives: list[dict[str, Any]]) -> None:
    """Live one life after the other."""
    for name in (f"recipes.{recipe}.train", *_OF_EVERY_LIFE):
        importlib.import_module(name)
    for name in _LAZY.get(recipe, ()):
        getattr(importlib.import_module("transformers"), name)
    needed: dict[str, int] = {}
    for life in lives:
        if "limit" in life:
            step, share, measured_in = life["limit"]
            life["limit"] = [step, int(share * needed.get(measured_in, 0))]
        pid = os.fork()
        if pid == 0:
            log = os.open(life["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            live(recipe, life)
            return
        _, status, used = os.wait4(pid, 0)
        if (measured := Path(life["log"]).with_suffix(".bytes")).exists():
            needed[life["name"]] = int(measured.read_text())
        told = {"name": life["name"], "status": os.waitstatus_to_exitcode(status), "bytes": needed.get(life["name"])}
        told["cpu_seconds"] = round(used.ru_utime + used.ru_stime, 2)
        print(json.dumps(told), flush=True)  # noqa: T201


main(sys.argv[1], json.loads(sys.argv[2]))
