"""The ranks of a replica whose model is divided: actors in the bundles of its placement group, on one machine or on several.

The replica is rank 0, in the first bundle. Ray chooses the machines of the bundles, and gives each rank its GPU.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvpool.engine.rank_meeting import MetRanks, Place, arrive
from kvpool.engine.rank_process import follow
from kvpool.engine.ranks import rank_devices
from kvpool.errors import ConfigError, RankError

_KILL_SECONDS = 10.0  # for Ray to notice that it has ended an actor


class RankActor:
    """The actor of a rank other than 0."""

    def serve(self, place: list[Any], rank: int, size: int, device: str | None) -> int:
        """Serves the engine of rank 0 until it is gone."""
        return follow(*arrive(Place(*place), rank, lambda: rank_devices(device, size, 1)[0]))


class _Started:
    """An actor as a process that can be waited for and killed."""

    def __init__(self, actor: Any, *arguments: Any) -> None:
        self._actor = actor
        self.served = actor.serve.remote(*arguments)

    def wait(self, seconds: float | None = None) -> int:
        try:
            ray.get(self.served, timeout=_KILL_SECONDS if seconds is None else seconds)
        except GetTimeoutError:
            if seconds is not None:
                raise TimeoutError from None
        except RayError:  # it was killed, or its machine is gone
            pass
        return 0

    def kill(self) -> None:
        ray.kill(self._actor)


class RayRanks(MetRanks):
    """Ranks in the placement group of this process. Those on other machines come to `host`."""

    def __init__(self, size: int, *, device: Any, host: str) -> None:
        self._where, self._device = host, device
        super().__init__(size, device=device)

    def _num_here(self) -> int:
        return 1  # Ray shows each of them one GPU

    def _host(self) -> str:
        return self._where

    def _call(self, place: Place) -> None:
        group = get_current_placement_group()
        bundles = [] if group is None else group.bundle_specs
        if len(bundles) < self.size:
            raise ConfigError(
                f"tensor_parallel={self.size}, but the placement group of this replica has {len(bundles)} bundles"
            )
        for rank in range(1, self.size):
            needs = dict(bundles[rank])
            options = {
                "num_cpus": needs.pop("CPU", 0),
                "num_gpus": needs.pop("GPU", 0),
                "memory": needs.pop("memory", None),
            }
            actor = ray.remote(RankActor).options(
                **options,
                resources={name: amount for name, amount in needs.items() if name != "bundle"},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            self.processes.append(_Started(actor.remote(), list(place), rank, self.size, self._device))

    def _look(self) -> None:
        ended, _ = ray.wait([each.served for each in self.processes], timeout=0)
        for each in ended:
            rank = 1 + [started.served for started in self.processes].index(each)
            try:
                why = f"with status {ray.get(each)}"
            except RayError as error:
                why = str(error).strip().splitlines()[-1]
            raise RankError(f"rank {rank} ended before it came to rank 0: {why}")
