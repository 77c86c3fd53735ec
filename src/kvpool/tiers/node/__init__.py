"""One cache for a whole machine: a process that owns shared memory and its index, and the tier by which engines use it."""
