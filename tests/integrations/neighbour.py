"""A connector beside ours in vLLM's MultiConnector: it shakes hands with NIXL's metadata, and does nothing else."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

PAYLOAD = NixlHandshakePayload(compatibility_hash="hash", agent_metadata_bytes=b"agent")
seen: list[Any] = []


class Neighbour(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """Refuses the metadata of others, as NIXL's connector does."""

    def get_handshake_metadata(self) -> Any:
        return PAYLOAD

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for each in metadata.values():
            if not isinstance(each, NixlHandshakePayload):
                raise ValueError(f"NIXL's metadata were expected, and {type(each).__name__} came")
        seen.append(list(metadata.values()) == [PAYLOAD])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
