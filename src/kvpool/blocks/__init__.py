"""The control plane: block ids, tables, the prefix tree and everything that is decided about them. Numbers only."""
