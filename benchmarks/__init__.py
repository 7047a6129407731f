"""Every figure that holdfast states about itself, each measured by one script; see README.md.

All of them use one thread: times of several threads depend on what else the machine does, and a
process with more than one cannot be forked. The libraries read this when they are imported, so it
is set before.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
