"""`python -m plait.cli`, as `torchrun -m` needs it."""

import sys

from plait.cli.main import main

sys.exit(main())
