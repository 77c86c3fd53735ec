"""kvpool inside other engines. Each module needs the engine that it serves, so nothing imports them by default."""
