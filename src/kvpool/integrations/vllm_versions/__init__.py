"""A thin module for each supported minor version of vLLM, with only what its connector interface needs."""
