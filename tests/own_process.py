"""Calls a function in a process of its own, for tests that count what lives in a process.

Objects that other tests have left would be counted with it, and threads of theirs go on making some.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def in_own_process(function: Callable[..., Any], *given: Any) -> Any:
    """Return what a function of a module returns, called in a new interpreter with one thread, as tests have it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.submit(function, *given).result()
