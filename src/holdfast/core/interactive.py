"""Tell whether someone works with this process interactively, as in a notebook."""

from __future__ import annotations

import sys


def is_interactive() -> bool:
    """Return whether this process is a notebook's kernel, IPython or Python's prompt.

    All of them set ``sys.ps1``, the text of the prompt.
    """
    return hasattr(sys, "ps1")
