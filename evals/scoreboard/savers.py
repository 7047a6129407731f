"""Loaded first where programs are forked.

Saves are seen by `holdfast chaos` also by names that were bound before.
"""

import importlib
import os
import sys
import tempfile

from holdfast.chaos.observation.torch_observer import SAVERS


def _redirect(module, name):
    """Put a function in its place, wherever it is bound, that calls whatever the module's own
    name has become.
    """
    original, inside = getattr(module, name), []

    def call(*args, **kwargs):
        now = getattr(module, name)
        if inside or now is call:
            return original(*args, **kwargs)
        inside.append(1)
        try:
            return now(*args, **kwargs)
        finally:
            inside.clear()

    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, call)


for _module, _name in SAVERS.items():
    if _module != "torch.serialization":  # which everybody calls as torch.save
        _redirect(importlib.import_module(_module), _name)
# It is another for each fork
os.register_at_fork(after_in_child=lambda: setattr(tempfile, "tempdir", None))
