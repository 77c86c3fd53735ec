"""Paged attention: what it computes, its reference, and its kernels."""
