"""Blocks on their way between a cache and tiers: what to load, whether it pays, and the threads that load and store."""
