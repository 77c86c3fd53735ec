"""What the router weighs, in one unit: the time in which a node computes one token of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpool.config.layers import check_int, check_number
from kvpool.errors import ConfigError


@dataclass(frozen=True)
class RoutingConfig:
    """Weights and limits of a `Router`. Costs are in tokens of a prompt that a node computes.

    A cached token costs nothing on the GPU, `cpu_cost` where it comes up from host memory, `storage_cost` from storage. A
    running request makes every other one on its node slower: `decode_cost`, plus `context_cost` for each token that it reads.
    """

    cpu_cost: float = 0.1
    storage_cost: float = 0.3
    decode_cost: float = 32.0
    context_cost: float = 0.005
    placed_cost: float = 0.05  # for each token that a node computed lately: new blocks push others out there
    placed_seconds: float = 300.0  # half of them are forgotten after so long
    session_tokens: int = 256  # how much cheaper its last node is for the next request of a session
    session_seconds: float = 600.0
    assumed_seconds: float = 5.0  # how long a prompt counts as cached where it was sent, until events say so
    hot_requests: int = 32  # a cached prefix with so many requests within `hot_seconds` gets one more node
    hot_seconds: float = 10.0
    max_node_requests: int = 256  # a node with as many gets no more while another has room
    max_node_tokens: int = 131_072  # the same for tokens of prompts that it has still to compute

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int":
                check_int(each.name, value, 0 if each.name == "session_tokens" else 1, 1 << 40)
            elif not check_number(each.name, value, "a number, 0 or more") >= 0:
                raise ConfigError(f"{each.name}={value} must be a number, 0 or more")
