"""What fits and what it costs, from a model's configuration and a machine."""
