"""`kvpool`: the command line. Each command lives in the package it belongs to and is imported only when it is called."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import typer


_USAGE = 2  # the status of a command line that cannot be read
_PLANNING = ("plan", "replay")  # they know options of other engines


class Command(NamedTuple):
    """A command: the module that has `register(app, name)`, one line of help, what it needs."""

    module: str
    help: str
    extra: str = "cli"  # brings the packages that the module imports


# To add a command: write a module with `register(app: typer.Typer, name: str)` and name it here.
COMMANDS = {
    "trace": Command("kvpool.replay.trace_command", "Look at, convert and synthesise workload traces."),
    "replay": Command("kvpool.replay.replay_command", "Replay a trace: what would a policy, a size or a tier reuse?"),
    "fleet": Command("kvpool.replay.fleet_command", "Simulate a cluster on a trace: hits, waiting, index, events."),
    "plan": Command("kvpool.replay.plan_command", "What fits: weights, KV bytes, sequences and tiers of a model."),
    "generate": Command("kvpool.engine.text_commands", "Complete prompts with a model.", extra="hf"),
    "chat": Command("kvpool.engine.text_commands", "Talk to a model in the terminal.", extra="hf"),
    "serve": Command("kvpool.server.serve_command", "Serve a model to every OpenAI client.", extra="server"),
    "route": Command(
        "kvpool.cluster.proxy.route_command", "One endpoint in front of servers, by what each has cached."
    ),
    "prove": Command("kvpool.prove.prove_command", "Does the KV cache of an engine give right answers?"),
    "why": Command("kvpool.server.why_command", "Ask a running server why a prompt is not cached.", extra="server"),
    "view": Command("kvpool.view.view_command", "Open the live view of a cache on made-up traffic."),
    "tier": Command("kvpool.tiers.tier_command", "Look after disk tiers and remote stores: list, verify, purge."),
    "node": Command("kvpool.tiers.node.node_command", "Own memory that all engines of a machine use as one cache."),
    "warm": Command(
        "kvpool.engine.bench_command", "Compile and keep what a model needs, so that engines start fast.", extra="hf"
    ),
    "doctor": Command("kvpool.integrations.doctor", "What is installed, what works with it, and how to start that."),
    "bench": Command("kvpool.engine.bench_command", "Measure a model on this machine.", extra="hf"),
}


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The application with the called command loaded; of the others only the names and their help."""
    import typer

    app = typer.Typer(
        name="kvpool",
        help="A paged KV-cache manager for transformer inference, and its tools.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its tables leave a column of twenty letters for help in a terminal of eighty
    )
    called = next((word for word in arguments if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        if name == called:
            import_module(command.module).register(app, name)
        else:
            app.command(name, help=command.help)(_not_called)

    def show_version(asked: bool) -> None:
        if asked:
            print(version_line())
            raise typer.Exit

    version = typer.Option(
        False,
        "--version",
        callback=show_version,
        is_eager=True,
        help="Say which kvpool this is.",
    )

    @app.callback()
    def root(_: bool = version) -> None:
        """Gives the application its own help even when it has a single command."""

    return app


def version_line() -> str:
    """Which kvpool this is: its version, and whether its C modules are there."""
    from kvpool.version import __version__, compiled

    return f"kvpool {__version__} ({'with C modules' if compiled else 'pure Python'})"


def _not_called() -> None:
    """Stands for a command that this call does not run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status. What kvpool refuses is one line on stderr, not a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app = build_app(words)
    except KeyboardInterrupt:  # while modules load, which takes seconds on a busy machine
        return 130
    except ModuleNotFoundError as error:
        if words == ["doctor"] or words == ["--version"]:  # what is installed can be asked whatever is missing
            from kvpool.integrations.doctor import diagnosis

            print("\n".join(diagnosis()) if words == ["doctor"] else version_line())
            return 0
        called = words[0] if words and error.name not in ("typer", "rich") else ""
        extra = COMMANDS[called].extra if called in COMMANDS else "cli"
        print(
            f"kvpool: the command line needs {error.name}: pip install '.[{extra}]' in a checkout of kvpool",
            file=sys.stderr,
        )
        return 2
    from kvpool.errors import KVPoolError
    from kvpool.removed import instead_of, instead_of_command

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows something for it
            stream.reconfigure(errors="replace")
    try:
        app(args=words, prog_name="kvpool")
    except SystemExit as stop:
        hint = None
        if stop.code == _USAGE and words[0] not in _PLANNING:
            hint = instead_of_command(words) or instead_of(words)
        if hint is not None:
            print(f"kvpool: {hint}", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else 1
    except KVPoolError as error:
        print(f"kvpool: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except OSError as error:  # of the machine, not ours: a full disk behind stdout
        print(f"kvpool: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
