"""The connector for engines that keep keys and values in pages. It knows tokens, page numbers and opaque bytes."""
