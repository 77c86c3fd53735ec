"""The live view: `serve(manager)` opens a page with the blocks, requests, prefix tree, tiers and events of a manager."""

from kvpool.view.http import LiveView, serve

__all__ = ["serve", "LiveView"]
