"""The data plane: the bytes behind the block ids. Needs torch (`pip install kvpool[torch]`)."""
