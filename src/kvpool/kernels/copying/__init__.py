"""Bytes moved as they are: blocks inside one memory, small arrays from the host to a GPU."""
