"""Cache events between processes: the form of the field, publishing and subscribing."""
