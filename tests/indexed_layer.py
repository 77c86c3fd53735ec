"""A layer that stores a part beside keys and values, as sparse attention keeps the keys of its indexer: data, not code."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool import LayerSpec
from kvpool.config.layers import TokenPart


@dataclass(frozen=True)
class IndexedLayer(LayerSpec):
    """Keys and values, and one short key of an indexer for all heads."""

    index_dim: int = 4

    @property
    def parts(self) -> tuple[TokenPart, ...]:
        """Those of the layer, and the indexer's keys."""
        return (*super().parts, TokenPart("index", self.dtype.of_keys, 1, self.index_dim))
