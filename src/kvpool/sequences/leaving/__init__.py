"""How a sequence leaves the GPU: to its end, or to the host and back."""
