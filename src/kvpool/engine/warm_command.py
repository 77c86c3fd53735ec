"""`kvpool warm`: compiles ahead what the first start of an engine would compile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvpool.engine import options as opt
from kvpool.engine.params import SamplingParams


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(warm)


@opt.command
def warm(
    *,
    engine_options: opt.EngineOptions,
    max_sequences: Annotated[int, typer.Option(help="Sequences in one step.", min=1)] = 256,
    quiet: opt.Quiet = False,
) -> None:
    """Compile and keep what a model needs on this GPU, so that the next engines start fast.

    \b
    kvpool warm --model DIR
    kvpool warm --model DIR --compile --kv-dtype int8   # as you will serve it

    Triton's and torch's caches keep it, by GPU, version, shape and type; the
    folders are printed. Set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to
    put them into an image or onto a volume.
    """
    opt.tell_loading("loading the model ...", quiet)
    with engine_options.make_engine(keyed_tiers=False, scheduler=opt.limits(None, max_sequences)) as engine:
        engine.warm_up()
        engine.generate([[0] * 8], SamplingParams(max_new_tokens=2, ignore_eos=True))
        stages = {**engine.start_seconds, "capturing all CUDA graphs, which are not kept": engine.graphs.seconds}
    for name, seconds in stages.items():
        print(f"{seconds:7.1f} s  {name}")
    for name, folder in _folders().items():
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
        print(f"{size / 2**20:7.1f} MiB of {name}: {folder}")


def _folders() -> dict[str, Path]:
    """Where compiled kernels are kept."""
    from kvpool.model.compiled_layers import layers_folder

    triton = os.environ.get("TRITON_CACHE_DIR")
    return {
        "kernels": Path(triton) if triton else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache",
        "layers": layers_folder(),
    }
