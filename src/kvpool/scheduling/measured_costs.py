"""What computing and moving tokens costs on a machine, as `kvpool bench` measured it.

`kvpool bench --json FILE` times real steps of a model and writes a `Measurement`; `--costs FILE` reads it. Costs hold for
the model and the machine they were measured with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config import LayerSpec
from kvpool.config.layers import MAX_BYTES, check_int, check_number, show
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError
from kvpool.formats import other_format
from kvpool.jsonfile import read_json
from kvpool.scheduling.cost_model import LinearCostModel

COSTS = (
    "prefill_seconds_per_token",
    "seconds_per_token_pair",
    "decode_seconds_per_step",
    "decode_seconds_per_sequence",
    "decode_seconds_per_context_token",
    "transfer_latency",
    "transfer_bytes_per_second",
)
FORMAT = 1
"""Of a measurement; one that says nothing has this format, too."""
SAME_MODEL = 0.05  # parameters of a config and of the model that was measured may differ by so much

Floats = npt.NDArray[np.float64]


class MeasuredStep(NamedTuple):
    """One measured forward pass: chunks of prompts as (tokens, context), and sequences that decoded over `context`."""

    prefills: Sequence[tuple[int, int]]
    num_sequences: int
    context: int
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """One model on one machine, as `kvpool bench` found them."""

    machine: str
    memory_bytes: int
    model: str
    parameters: int
    layers: tuple[LayerSpec, ...]
    costs: LinearCostModel
    errors: Mapping[str, float]  # median relative error of the costs in the steps they were fitted to

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; `read_costs` reads it back."""
        plain = {name: getattr(self, name) for name in ("machine", "memory_bytes", "model", "parameters")}
        return plain | {
            "format": FORMAT,
            "layers": [asdict(layer) for layer in self.layers],
            "costs": {name: getattr(self.costs, name) for name in COSTS},
            "errors": dict(self.errors),
        }

    def check_model(self, parameters: int) -> None:
        """Refuses a config of another model than the measured one."""
        if abs(parameters / self.parameters - 1) > SAME_MODEL:
            raise InvalidArgumentError(
                f"the costs were measured with {self.model} of {self.parameters / 1e9:.2f} B parameters, the config is of a "
                f"model with {parameters / 1e9:.2f} B; run `kvpool bench` with that model, or give --gpu instead"
            )


def read_costs(path: str | Path) -> Measurement:
    """The measurement in a file that `kvpool bench --json` wrote."""
    remedy = "make one with: kvpool bench --model MODEL --json costs.json"
    found = read_json(Path(path), InvalidArgumentError, remedy)
    plain = found.get("measurement") if isinstance(found, dict) else None
    if not isinstance(plain, dict):
        raise InvalidArgumentError(f"{path} holds no measurement of `kvpool bench`; {remedy}")
    if problem := other_format(plain.get("format", FORMAT), FORMAT, FORMAT, remedy):
        raise InvalidArgumentError(f"the measurement in {path} {problem}")
    try:
        return _measurement(plain)
    except KeyError as error:
        raise InvalidArgumentError(f"the measurement in {path} lacks {error}; {remedy}") from None
    except (KVPoolError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(f"the measurement in {path} is broken ({str(error)[:200]}); {remedy}") from None


def _measurement(plain: Mapping[str, Any]) -> Measurement:
    return Measurement(
        machine=_name(plain, "machine"),
        memory_bytes=check_int("memory_bytes", plain["memory_bytes"], 1, MAX_BYTES),
        model=_name(plain, "model"),
        parameters=check_int("parameters", plain["parameters"], 1, MAX_BYTES),
        layers=tuple(LayerSpec(**layer) for layer in plain["layers"]),
        costs=LinearCostModel(**{name: check_number(name, plain["costs"][name], "a number") for name in COSTS}),
        errors={str(name): check_number(name, value, "a number") for name, value in plain.get("errors", {}).items()},
    )


def _name(plain: Mapping[str, Any], key: str) -> str:
    if not isinstance(plain[key], str):
        raise ConfigError(f"{key}={show(plain[key])} must be a name")
    return str(plain[key])


def fit_costs(
    steps: Sequence[MeasuredStep], transfer_bytes_per_second: float
) -> tuple[LinearCostModel, dict[str, float]]:
    """The linear costs that explain measured steps best, and their median relative errors.

    Relative errors are minimised and no cost may be negative. Steps that decode and prefill at once are left out.
    """
    prefills = [step for step in steps if step.prefills and not step.num_sequences]
    decodes = [step for step in steps if step.num_sequences and not step.prefills]
    if len(prefills) < 2 or len(decodes) < 3:
        raise ConfigError(f"{len(prefills)} prefill and {len(decodes)} decode steps are too few to fit costs to")
    per_prompt = [
        (sum(n for n, _ in step.prefills), sum(n * (before + (n + 1) / 2) for n, before in step.prefills))
        for step in prefills
    ]
    prompt, prompt_error = _fit(per_prompt, [step.seconds for step in prefills])
    per_step = [(1, step.num_sequences, step.context) for step in decodes]
    decode, decode_error = _fit(per_step, [step.seconds for step in decodes])
    costs = LinearCostModel(
        prefill_seconds_per_token=prompt[0],
        seconds_per_token_pair=prompt[1],
        decode_seconds_per_step=decode[0],
        decode_seconds_per_sequence=decode[1],
        decode_seconds_per_context_token=decode[2],
        transfer_bytes_per_second=transfer_bytes_per_second,
    )
    return costs, {"prefill": prompt_error, "decode": decode_error}


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Non-negative least squares of relative errors: with so few columns, every choice of them can be tried."""
    measured = np.array(seconds, np.float64)
    matrix: Floats = np.array(rows, np.float64) / measured[:, None]
    width = matrix.shape[1]
    best, best_error = np.zeros(width), float("inf")
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            found = np.linalg.lstsq(matrix[:, columns], np.ones(len(measured)), rcond=None)[0]
            error = float(((matrix[:, columns] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(width), error
                best[list(columns)] = found
    return best.tolist(), float(np.median(np.abs(matrix @ best - 1)))
