"""What clients may ask, who they are, and how much at once: bodies, keys, limits, problems, the models that are served."""
