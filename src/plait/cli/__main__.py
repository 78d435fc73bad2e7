"""`python -m plait.cli`, as `torchrun -m` needs it."""

from plait.cli.main import script

script()
