"""vLLM's connector: `--kv-transfer-config` names this module and `KVPoolConnector`. How to use it: docs/vllm.md.

Importing this needs vLLM. With an unknown version, it raises an error of one line that names the known ones.
"""

from __future__ import annotations

from contextlib import suppress

from kvpool.integrations.vllm_versions.installed import load_adapter

KVPoolConnector = load_adapter().KVPoolConnector

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402

with suppress(ValueError):  # it is known already
    # vLLM's MultiConnector looks for the class of statistics by its name alone.
    KVConnectorFactory.register_connector("KVPoolConnector", __name__, "KVPoolConnector")

__all__ = ["KVPoolConnector"]
