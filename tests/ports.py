"""Ports for programs that listen some time after their number was chosen."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_LOWEST = 10_000
_RANGE_OF_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def unused_port() -> int:
    """Return a port on which nobody listens.

    It lies below those that the kernel hands out for connections and for port 0, so that nobody
    gets it before the caller's program listens there. Each call returns another one.
    """
    for port in _candidates():
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("there is always another candidate")


@cache
def _candidates() -> Iterator[int]:
    """Return ports in a circle, which begins elsewhere in each process."""
    lowest_of_kernel = int(_RANGE_OF_KERNEL.read_text().split()[0])
    ports = range(_LOWEST, lowest_of_kernel)
    first = os.getpid() * 101 % len(ports)
    return itertools.cycle([*ports[first:], *ports[:first]])
