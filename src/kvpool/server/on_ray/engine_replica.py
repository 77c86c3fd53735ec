"""One engine as a replica: it answers what a front sends, announces its cache, and says where."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpool.errors import SequenceStateError
from kvpool.server.auth import Access
from kvpool.server.limits import Limits
from kvpool.server.on_ray.asgi_call import Head, called
from kvpool.server.serve_settings import ModelSettings


@dataclass(frozen=True)
class ReplicaPlan:
    """What a replica is made of; it travels to wherever Ray starts one."""

    model: ModelSettings
    access: Access
    limits: Limits
    traces: str | None = None
    host: str | None = None  # where to announce the cache; None: at the address by which Ray knows the machine


class EngineReplica:
    """What Ray Serve makes of a `ReplicaPlan`."""

    def __init__(self, plan: ReplicaPlan) -> None:
        import ray
        from ray import serve

        from kvpool.server.app import create_app
        from kvpool.server.served_model import ServedModel
        from kvpool.server.tracing import Tracing

        context = serve.get_replica_context()
        model = placed(plan.model, plan.host or ray.util.get_node_ip_address(), context.rank.local_rank)
        self._engine = model.make_engine()
        self._tracing = None if plan.traces is None else Tracing.to(plan.traces)
        self._app = create_app([ServedModel(model.name, self._engine)], plan.access, plan.limits, self._tracing)

    def record_replica_metadata(self) -> dict[str, Any]:
        """What Ray tells the routers of this replica; a hook of Ray Serve."""
        publisher = self._engine.publishes
        assert publisher is not None
        return {
            "block_size": self._engine.config.block_size,
            "events": publisher.endpoint,
            "replay": publisher.replay_endpoint,
            "pid": os.getpid(),
        }

    async def check_health(self) -> None:
        """Raises if the engine is dead, and takes long if it hangs: Ray starts another one then. A hook of Ray Serve."""
        await asyncio.to_thread(self._engine.stats)  # which an engine that has ended still answers
        if self._engine.is_closed:
            raise SequenceStateError("the engine of this replica has ended")

    async def answer(self, scope: dict[str, Any], content: bytes, ticket: None = None) -> AsyncIterator[Head | bytes]:
        """The answer to a request, as the server on one machine gives it. `ticket` was for the router."""
        async for part in called(self._app, scope, content):
            yield part

    def __del__(self) -> None:
        if not hasattr(self, "_app"):  # it could not be made
            return
        self._app.state.server.gate.is_draining = True
        self._engine.close()
        if self._tracing is not None:
            self._tracing.close()


def placed(model: ModelSettings, address: str, number: int) -> ModelSettings:
    """A model as the replica of this number on its machine runs it: with events and a disk of its own."""
    host = f"[{address}]" if ":" in address else address
    options = model.options.changed(publish=f"tcp://{host}:0")
    if (disk := options.tiers(model.host_memory).disk) is not None:
        options = options.changed(disk=str(Path(disk) / f"replica-{number}"))
    return replace(model, options=options)
