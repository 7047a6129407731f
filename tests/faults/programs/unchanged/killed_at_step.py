"""Run a script that kills itself with SIGKILL right after an optimizer step.

The step is in the environment variable ``KILL_AT_STEP``. Without it, nothing is killed.
"""

import itertools
import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

# Neither this counter nor the environment is among the variables that a resume restores.
steps = itertools.count(1)


def count(*_):
    if next(steps) == int(os.environ.get("KILL_AT_STEP", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(count)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
