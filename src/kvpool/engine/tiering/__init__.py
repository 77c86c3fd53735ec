"""Keyed tiers behind an engine: prefixes come from them before they are computed, and what was computed goes to them."""
