"""Who gives way when room is needed, and where it goes: out of the index, or to another tier."""
