"""Tiers: an engine ends, another one starts, and the prompt comes from disk instead of being computed. Needs torch."""

from tempfile import TemporaryDirectory

from kvpool.engine import Engine, SamplingParams

# A tiny model with random weights, so that this runs anywhere. Put the directory of a real one here.
MODEL = {"model_type": "llama", "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
prompt = [3 + number % 150 for number in range(200)]

with TemporaryDirectory() as directory:
    answers = []
    for life in ("first", "second"):
        # remote="redis://cache.example:6379" instead of disk= shares blocks between machines.
        with Engine(MODEL, kv_blocks=64, disk=directory, disk_bytes="64MB") as engine:
            (result,) = engine.generate([prompt], SamplingParams(max_new_tokens=8, temperature=0.0))
            answers.append(result.token_ids)
            loaded = engine.stats().tiers.prompt_tokens_loaded
            print(f"{life} engine: {loaded} of {len(prompt)} prompt tokens came from disk")

print("the answers are the same:", answers[0] == answers[1])
