"""vLLM finds after a restart what it computed before. Run it twice by the Python of vLLM: vllm_connector.py MODEL DISK."""

import os
import sys

os.environ.setdefault(
    "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
)  # everything in this process, so that its end is the engine's

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

model, disk = sys.argv[1:]
connector = KVTransferConfig(
    kv_connector="KVPoolConnector",
    kv_connector_module_path="kvpool.integrations.vllm",
    kv_role="kv_both",
    kv_load_failure_policy="recompute",
    kv_connector_extra_config={"host_bytes": "64MB", "disk": disk, "disk_bytes": "64MB"},
)
options = {
    "block_size": 32,
    "max_model_len": 2048,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}  # ids in, ids out
engine = LLM(model, kv_transfer_config=connector, **options)
prompt = {"prompt_token_ids": [3 + number % 150 for number in range(200)]}
sampling = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False)
(result,) = engine.generate([prompt], sampling, use_tqdm=False)
print("answer:", list(result.outputs[0].token_ids))
print(f"{result.num_cached_tokens} of 200 prompt tokens came from kvpool")
engine.generate([{"prompt_token_ids": [3, 4, 5]}], sampling, use_tqdm=False)  # blocks go to disk during the next steps
engine.llm_engine.engine_core.shutdown()
