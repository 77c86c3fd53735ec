"""Which kvpool this is: its version, and whether its C modules are there (see `hatch_build.py`)."""

from importlib.util import find_spec

__version__ = "0.3.0"

compiled = find_spec("kvpool.pools._short_arrays") is not None
