"""Pictures and reports of replays."""
