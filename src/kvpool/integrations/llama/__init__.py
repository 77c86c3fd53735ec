"""States of llama.cpp in kvpool's tiers: what a state is on the way, where it lies, and whose it is."""
