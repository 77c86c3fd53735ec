"""What others are told of cached content, and how blocks are named outside this process."""
