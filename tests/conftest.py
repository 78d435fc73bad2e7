"""One thread a process: ranks are forked from here, and would deadlock after a threaded op."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# Machines are shared: how long an example takes says nothing.
settings.register_profile("plait", deadline=None)
settings.load_profile("plait")
