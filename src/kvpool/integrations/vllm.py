"""vLLM's connector: `--kv-transfer-config` names this module and `KVPoolConnector`. How to use it: docs/vllm.md.

Importing this needs vLLM; with a version that is not known it raises one line that says which are.
"""

from __future__ import annotations

from kvpool.integrations.vllm_versions.installed import load_adapter

KVPoolConnector = load_adapter().KVPoolConnector

__all__ = ["KVPoolConnector"]
