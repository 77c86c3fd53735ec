"""Runs Hugging Face causal language models on the cache. Needs torch and transformers (`pip install kvpool[hf]`)."""
