"""The figures of a node over HTTP: /metrics for Prometheus, /stats as JSON (who holds what).

A request to a loopback address must name that address in its `Host` header: pages of other sites get nothing (DNS rebinding).
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvpool.checks import is_local_name, is_loopback
from kvpool.prometheus import metric_lines
from kvpool.tiers.node.service import COUNTS

_GAUGES = {
    "num_values": ("kvpool_node_values", "Values in memory."),
    "used_bytes": ("kvpool_node_used_bytes", "Bytes of slots that hold a value or are reserved."),
    "capacity_bytes": ("kvpool_node_capacity_bytes", "Bytes of the region."),
    "num_clients": ("kvpool_node_connections", "Connections of engines."),
    "waiting_bytes": ("kvpool_node_waiting_bytes", "Bytes that wait for tiers behind the node."),
}
_BEHIND = ("hits", "misses", "load_failures", "late_loads", "stored", "refused", "store_failures", "late_stores")
_SECONDS = 5.0


def prometheus_text(stats: dict[str, Any]) -> str:
    """What /metrics answers."""
    return "".join(f"{line}\n" for line in _lines(stats))


def _lines(stats: dict[str, Any]) -> Iterator[str]:
    for name, (metric, about) in _GAUGES.items():
        yield from metric_lines(metric, "gauge", about, [({}, stats[name])])
    for name in ("evicted", *COUNTS):
        about = f"Since the start: {name.replace('_', ' ')}."
        yield from metric_lines(f"kvpool_node_{name}_total", "counter", about, [({}, stats[name])])
    for name, of in (("engine", "engines"), ("tenant", "tenants")):
        used = [({name: label}, used) for label, used in stats[of].items()]
        yield from metric_lines(
            f"kvpool_node_{name}_bytes", "gauge", f"Bytes of slots by {name}, those with most.", used
        )
    for name in _BEHIND:
        about = f"{name.replace('_', ' ')} of tiers behind the node."
        counted = [({"tier": tier["name"]}, tier[name]) for tier in stats["behind"]]
        yield from metric_lines(f"kvpool_node_behind_{name}_total", "counter", about, counted)


class MetricsServer:
    """Answers in threads of its own; `look` brings the figures, and may raise queue.Empty where that takes too long."""

    def __init__(self, host: str, port: int, look: Callable[[float], dict[str, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _SECONDS

            def do_GET(self) -> None:
                kinds = {"/metrics": "text/plain; version=0.0.4; charset=utf-8", "/stats": "application/json"}
                address = str(self.connection.getsockname()[0])
                if is_loopback(address) and not is_local_name(self.headers.get("Host", "")):
                    self.send_error(403, "at this address the node answers to names of its own machine only")
                    return
                if self.path not in kinds:
                    self.send_error(404, "there are /metrics and /stats")
                    return
                try:
                    stats = look(_SECONDS)
                except queue.Empty:
                    self.send_error(503, "the node is busy")
                    return
                body = (prometheus_text(stats) if self.path == "/metrics" else json.dumps(stats)).encode()
                self.send_response(200)
                self.send_header("Content-Type", kinds[self.path])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """A node logs no requests."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="kvpool-node-metrics", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()  # returns when `serve_forever` has ended
        self._server.server_close()
