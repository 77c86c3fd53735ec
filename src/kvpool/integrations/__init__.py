"""kvpool inside other engines. Nothing here is imported by itself: a module needs the engine that it serves."""
