"""The tree of cached runs: a run and its blocks, how it is found by content, and what hangs on it."""
