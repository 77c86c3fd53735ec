"""The commands `kvpool trace`, `kvpool replay` and `kvpool plan`."""
