"""What a connector does in any engine that keeps keys and values in pages: it knows tokens, page numbers and opaque bytes."""
