"""How an answer is made and goes out: one exchange, whole or as a stream, and what is measured of it."""
