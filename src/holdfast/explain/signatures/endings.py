"""The ids of the signatures that code refers to by name.

Most of these signatures are chosen according to how a process ended, if no statement says why it
ended. Their entries are in ``endings.yaml``. The other signatures are matched by text but need
special treatment in code.
"""

from __future__ import annotations

UNKNOWN = "H1600"
ENDED_WELL = "H1601"
KILLED = "H1602"
TERMINATED = "H1603"
INTERRUPTED = "H1604"
ABORTED = "H1605"
BUS_ERROR = "H1606"
STATUS_ONLY = "H1607"
UNCAUGHT = "H1608"
KILLED_UNCOUNTED = "H1609"
NEVER_STARTED = "H1610"
STILL_RUNNING = "H1611"
STUCK = "H1612"
HUNG_UP = "H1613"
OTHER_SIGNAL = "H1614"
SUPERVISOR_LOST = "H1616"
TRAINING_LOST = "H1617"
ERROR_LINE = "H1618"
ELSEWHERE = "H1619"
NOT_SAVED = "H1622"
SHADOWED = "H1620"
STOPPED = "H1623"
NOT_LEARNED = "H1625"
NOT_JUDGED = "H1626"
WAITED_FOR_LOADER = "H1627"
REPEATED_DIFFERENTLY = "H1628"
MEMORY_GREW = "H1511"
OUT_OF_MEMORY_KILL = "H909"
LAUNCHER = "H1120"
COLLECTIVE_TIMEOUT = "H921"
WORKER_KILLED = "H930"
SEGMENTATION_FAULT = "H991"
NATIVE_ABORT = "H1342"
XID = "H916"
NCCL_FAILED = "H923"
