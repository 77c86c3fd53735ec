"""Loads models of transformers, inspects and checks them, and hooks them to the paged cache."""
