"""Engines as replicas of a Ray Serve deployment: `kvpool serve --ray`. Only its modules with Ray in them import it."""
