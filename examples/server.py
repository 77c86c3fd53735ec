"""A server: a model behind OpenAI's API, asked twice by OpenAI's own client. Needs kvpool[server], torch and openai."""

import socket
import threading
import time

import uvicorn
from openai import OpenAI

from kvpool.engine import Engine
from kvpool.server import ServedModel, create_app

# A tiny model with random weights, so that this runs anywhere. For a real one: kvpool serve DIRECTORY.
MODEL = {"model_type": "llama", "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
prompt = [3 + number % 150 for number in range(200)]

with Engine(MODEL, kv_blocks=64) as engine, socket.create_server(("127.0.0.1", 0)) as listener:
    server = uvicorn.Server(uvicorn.Config(create_app([ServedModel("tiny", engine)]), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    client = OpenAI(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1", api_key="none")
    for turn in ("first", "second"):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        print(f"{turn} request: {cached} of {answer.usage.prompt_tokens} prompt tokens were cached")
    server.should_exit = True
    thread.join()
