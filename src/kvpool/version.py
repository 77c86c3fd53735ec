"""Which kvpool this is: its version, and whether its control plane was compiled (see `hatch_build.py`)."""

from kvpool.core import node

__version__ = "0.2.0"

compiled = not str(node.__file__).endswith(".py")
