"""How a sequence goes on: places for new tokens and their slots, commits, tokens taken back."""
