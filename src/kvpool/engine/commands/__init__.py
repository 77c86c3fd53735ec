"""`kvpool generate`, `kvpool chat` and `kvpool bench`."""
