"""Keys and values into their slots and back, converted or quantised on the way."""
