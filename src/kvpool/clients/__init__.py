"""What talks to a running server: the load tool behind `kvpool bench serve`, and `kvpool top`."""
