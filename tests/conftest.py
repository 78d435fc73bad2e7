"""One thread a process: ranks are forked from here, and would deadlock after a threaded op."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
