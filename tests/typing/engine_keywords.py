"""`make types` checks this file and nobody runs it: mypy refuses a comment that names no error."""

from kvpool.engine import Engine


def right() -> None:
    """Settings by their names."""
    Engine("model", kv_bytes=8 << 30, disk="prefixes", overlap=None)


def wrong() -> None:
    """A setting that does not exist, and one of another type."""
    Engine(kv_bytez=3)  # type: ignore[call-arg]
    Engine(kv_bytes="8GiB")  # type: ignore[arg-type]
