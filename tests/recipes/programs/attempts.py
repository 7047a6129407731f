"""Attempts of a recipe.

``python -m recipes.NAME OPTIONS`` in copies of one process that has imported it once.

    python attempts.py NAME '[{"name": ..., "options": [...], "log": ..., ...}, ...]'

What may be done to an attempt: ``measure`` (find out what memory the n-th step takes), ``limit``
(let the n-th step have only a share of what it takes in an earlier attempt), ``die`` (SIGKILL so
many seconds after the n-th step), ``bad`` (a sample that cannot be read), ``killing`` (one that
kills the worker that reads it first, unless ``mark`` is there). One line of JSON is printed for
each.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.memory.host_memory import trim_heap
from holdfast.recorder.reader import read_events
from holdfast.testing import limit_memory, memory_limited

torch.set_num_threads(1)
# Take seconds where each attempt imports them anew
_OF_EVERY_ATTEMPT = ("torch._dynamo", "plotly.offline")
_LAZY = {
    "pegasus": ("DataCollatorForSeq2Seq", "PegasusForConditionalGeneration", "PegasusTokenizer"),
    "lora": ("AutoModelForCausalLM", "AutoTokenizer", "LlamaConfig", "LlamaForCausalLM"),
}
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
        if (
            index == self._killing
            and torch.utils.data.get_worker_info() is not None
            and not self._mark.exists()
        ):
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._samples[index]


def peak_bytes() -> int:
    """Return the most memory that this process has held since it was last asked to forget."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def make_attempt(recipe: str, attempt: dict[str, Any]) -> None:
    """Run the recipe with something done to it."""
    calls = 0

    def step(guard: Any, *args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if attempt.get("limit", [0])[0] == calls:
            trim_heap()
            with memory_limited(attempt["limit"][1]):
                return _step(guard, *args, **named)
        if attempt.get("measure") == calls:
            # As the limit does: what malloc holds free would take part of what the step takes
            trim_heap()
            Path("/proc/self/clear_refs").write_text("5")
            before = peak_bytes()
            result = _step(guard, *args, **named)
            Path(attempt["log"]).with_suffix(".bytes").write_text(str(peak_bytes() - before))
            return result
        result = _step(guard, *args, **named)
        # A thread that is waited for: the attempt cannot end before
        if attempt.get("die", [0])[0] == calls:
            threading.Timer(attempt["die"][1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        return result

    def init(guard: Any, *args: Any, **named: Any) -> None:
        if "bad" in attempt or "killing" in attempt:
            mark = Path(attempt.get("mark", os.devnull))
            hurting = Hurting(
                named["loader"].dataset, attempt.get("bad"), attempt.get("killing"), mark
            )
            object.__setattr__(named["loader"], "dataset", hurting)
        _init(guard, *args, **named)

    holdfast.Guard.step, holdfast.Guard.__init__ = step, init  # type: ignore[method-assign]
    sys.argv = [recipe, *attempt["options"]]
    runpy.run_module(f"recipes.{recipe}", run_name="__main__", alter_sys=True)


def run_dir(attempt: dict[str, Any]) -> Path:
    """Return where the attempt wrote."""
    return Path(attempt["log"]).with_suffix("")


def was_short(attempt: dict[str, Any]) -> bool:
    """Tell whether the attempt's limit refused it memory."""
    return any(
        event.kind == "out_of_memory"
        for event in read_events(run_dir(attempt) / "recorder" / "rank0")
    )


def forked(recipe: str, attempt: dict[str, Any], needed: dict[str, int]) -> tuple[int, Any]:
    """Make the attempt in a copy of this process; return how it ended, and what it used."""
    if (pid := os.fork()) == 0:
        log = os.open(attempt["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if not attempt.keys() & {"limit", "measure"}:  # may a batch be split? Nothing asks here
            os.environ["HOLDFAST_CHECK_SPLIT"] = "false"
        # What the first step freed must go back to the system, or it makes room for the next one
        else:
            # Never met: after a first limit the others leave malloc as the guard sets it
            limit_memory(2**45)
            os.environ["HOLDFAST_CPU_MALLOC_THRESHOLD_BYTES"] = str(attempt["malloc"])
            if not attempt["keeps_kernels"]:
                os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
        if "limit" in attempt:
            step, share, measured_in = attempt["limit"]
            attempt["limit"] = [step, int(share * needed.get(measured_in, 0))]
        make_attempt(recipe, attempt)
        sys.exit()
    _, status, used = os.wait4(pid, 0)
    return status, used


def main(recipe: str, attempts: list[dict[str, Any]]) -> None:
    """Make one attempt after the other."""
    for name in (f"recipes.{recipe}.train", *_OF_EVERY_ATTEMPT):
        importlib.import_module(name)
    for name in _LAZY.get(recipe, ()):
        getattr(importlib.import_module("transformers"), name)
    gc.collect()
    gc.freeze()  # a collection in a fork would look at all that was imported, and copy its pages
    needed: dict[str, int] = {}
    for attempt in attempts:
        status, used = forked(recipe, attempt, needed)
        while (
            "limit" in attempt
            and status == 0
            and not was_short(attempt)
            and attempt["limit"][1] > 0.4
        ):
            # What the allocator still held made room for all that was needed
            attempt["limit"][1] -= 0.1
            shutil.rmtree(run_dir(attempt))
            status, used = forked(recipe, attempt, needed)
        if (measured := Path(attempt["log"]).with_suffix(".bytes")).exists():
            needed[attempt["name"]] = int(measured.read_text())
        facts = {
            "name": attempt["name"],
            "status": os.waitstatus_to_exitcode(status),
            "bytes": needed.get(attempt["name"]),
        }
        facts["cpu_seconds"] = round(used.ru_utime + used.ru_stime, 2)
        print(json.dumps(facts), flush=True)  # noqa: T201


main(sys.argv[1], json.loads(sys.argv[2]))
