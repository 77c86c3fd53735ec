"""What a model is: loaded, looked at, checked, and hooked to the paged cache."""
