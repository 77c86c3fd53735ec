"""The data plane: the bytes behind the block ids. Needs torch (`pip install '.[torch]'`)."""

from kvpool.kernels.layout import Runs, SlotStates
from kvpool.storage.data_plane import DataPlane, StepSlots
from kvpool.storage.disk import DiskStore
from kvpool.storage.layout import GroupLayout, LayerCache, StateLayout, StoredPart
from kvpool.storage.memory import free_bytes, measure_budget
from kvpool.storage.moving import TakenBlocks
from kvpool.storage.states import StateSlots
from kvpool.storage.store import BlockStore
from kvpool.storage.transfer import Transfer, TransferEngine

__all__ = [
    "DataPlane",
    "StepSlots",
    "BlockStore",
    "DiskStore",
    "GroupLayout",
    "LayerCache",
    "Runs",
    "SlotStates",
    "StateLayout",
    "StateSlots",
    "StoredPart",
    "TakenBlocks",
    "Transfer",
    "TransferEngine",
    "free_bytes",
    "measure_budget",
]
