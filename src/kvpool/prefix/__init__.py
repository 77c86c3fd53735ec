"""Cached content: a tree of token runs, who reads them, what leaves it, when, and to which tier."""
