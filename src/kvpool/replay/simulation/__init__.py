"""Traces through the real manager and scheduler, beside the bounds that no policy can beat."""
