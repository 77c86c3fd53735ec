"""`kvpool prove`: does the KV cache of an engine give right answers? It asks any endpoint with OpenAI's API.

Read `trial.py` first: it says what is asked, and in which order. `endpoint.py` speaks HTTP, `prompts.py` writes the
prompts, `scale.py` tells noise from a fault, `report.py` says what came out.
"""
