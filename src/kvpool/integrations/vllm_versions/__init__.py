"""One thin module for each minor version of vLLM that is supported: what the interface looks like there, and nothing else."""
