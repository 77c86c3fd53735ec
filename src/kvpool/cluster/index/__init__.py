"""What every node of a cluster holds, followed by its events."""
