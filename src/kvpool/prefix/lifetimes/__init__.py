"""How long cached content stays: priorities by token range, deadlines, and what happens when one is reached."""
