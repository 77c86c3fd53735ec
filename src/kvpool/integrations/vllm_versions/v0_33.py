"""vLLM 0.33: it says when pages lose their memory and get it back, as in sleep mode.

Nothing is to be done then. vLLM resets the connector and waits for the GPU before, and pages come back at the same addresses.
"""

from __future__ import annotations

from kvpool.integrations.vllm_versions import v0_32

EXPECTED = {
    **v0_32.EXPECTED,
    "supports_sleep_mode": ("kv_transfer_config",),
    "unregister_kv_caches": (),
    "restore_kv_caches": (),
}

KVPoolConnector = v0_32.KVPoolConnector
