"""Engines as replicas of a Ray Serve deployment: `kvpool serve --ray`. Only modules that need Ray import it."""
