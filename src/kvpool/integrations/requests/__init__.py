"""Requests of an engine as a connector sees them."""
