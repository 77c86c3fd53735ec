"""The few GPU kernels, each beside a torch reference with the same signature."""
