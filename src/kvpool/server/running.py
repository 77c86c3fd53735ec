"""A server of models from its start to its end: it answers while they are loaded, serves them, drains and ends."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from kvpool.cluster.publisher import check_publishing
from kvpool.engine.options import tell, tell_loading
from kvpool.server.auth import Access
from kvpool.server.early_server import GRACE_SECONDS, EarlyServer
from kvpool.server.limits import Gate
from kvpool.server.serve_settings import ModelSettings, ServeSettings
from kvpool.server.tracing import Tracing

CUT_SECONDS = 2


def serve_models(settings: ServeSettings, models: Sequence[ModelSettings], access: Access, *, quiet: bool) -> None:
    """Loads the models and serves them until the process is told to end. Raises what ended an engine."""
    tracing = None if settings.traces is None else Tracing.to(settings.traces)
    logging.getLogger("kvpool").setLevel(settings.log_level.upper())
    for model in models:
        model.options.check_model()
    with ExitStack() as stack:
        server = stack.enter_context(EarlyServer(settings, GRACE_SECONDS))
        check_publishing(*(model.options.publish for model in models))
        engines = []
        for number, model in enumerate(models, 1):
            server.doing = f"it loads model {number} of {len(models)}"  # without its name, which not everybody may know
            tell_loading(f"loading {model.name} ...", quiet)
            engines.append(stack.enter_context(model.make_engine()))
        from kvpool.server.app import create_app  # here, because FastAPI and torch take seconds
        from kvpool.server.served_model import ServedModel

        served = [
            ServedModel(model.name, engine, model.tool_parser, settings.image_hosts)
            for model, engine in zip(models, engines, strict=True)
        ]
        app = create_app(
            served,
            access,
            settings.limits,
            tracing,
            any_name=settings.insecure,
            allow_origins=settings.allow_origins,
        )
        # What is there now stays. A full collection would look at half a million objects and stop all requests meanwhile.
        gc.collect()
        gc.freeze()
        for each in served:
            each.engine.warm_up(wait=False)
        server.hand_over(
            app,
            ", ".join(model.name for model in served),
            quiet,
            drain=partial(_drain, app.state.server.gate, quiet),
            is_over=lambda: any(each.engine.is_closed for each in served),
        )
        for each in served:
            if (failure := each.engine.failure) is not None:
                raise failure


def _drain(gate: Gate, quiet: bool) -> None:
    """Takes no more requests, and cuts those that are not over a little before uvicorn closes their connections."""
    gate.is_draining = True
    if gate.under_way:
        tell(f"finishing {gate.under_way} requests, for up to {GRACE_SECONDS} s; Ctrl-C ends them", quiet)
    asyncio.get_running_loop().call_later(GRACE_SECONDS - CUT_SECONDS, gate.cut_all)
