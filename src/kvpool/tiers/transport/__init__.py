"""The transport between a cache and its tiers: what to load, whether that pays, and the threads that load and store."""
