"""A running server in the terminal: what its /metrics say, what changed since the last look, and how that is shown."""
