"""A manager before your eyes: `serve(manager)` opens a page with its blocks, requests, prefix tree, tiers and events."""

from kvpool.view.http import LiveView, serve

__all__ = ["serve", "LiveView"]
