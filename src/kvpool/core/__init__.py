"""What everything else works on: the one `Cache` object, the nodes of its tree, the handles of its sequences."""
