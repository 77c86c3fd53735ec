"""The adaptive policy: what it learns from, how it orders candidates, and what it remembers of those that left."""
