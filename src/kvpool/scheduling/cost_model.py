"""What a step, a prompt or a transfer costs in seconds. Nothing else tells the scheduler about the hardware.

`kvpool bench --json FILE` times real steps of a model and writes a `Measurement`; `--costs FILE` reads it. Measured costs
hold for the model and the machine they were measured with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvpool.checks import check_int, check_number, show
from kvpool.config import LayerSpec, StatePart, StateSpec
from kvpool.config.layers import MAX_BYTES, described
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError
from kvpool.files import other_format, read_json

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


@runtime_checkable
class CostModel(Protocol):
    """Predicts times. The scheduler chooses whom to preempt, and how, by these; a simulator adds them up."""

    def prefill_seconds(self, num_tokens: int, context: int) -> float:
        """Computing `num_tokens` tokens of one prompt behind `context` tokens that are there already."""

    def decode_seconds(self, num_sequences: int, context: int) -> float:
        """One token for each of `num_sequences` sequences that together read `context` tokens."""

    def transfer_seconds(self, num_bytes: int) -> float:
        """Moving bytes between the GPU and the host, one way."""


@runtime_checkable
class LearningCostModel(CostModel, Protocol):
    """A cost model that corrects itself from measured times."""

    def observe_step(
        self, prefills: Sequence[tuple[int, int]], num_sequences: int, context: int, seconds: float
    ) -> None:
        """A measured forward pass: `prefills` as (tokens, context), and `num_sequences` that decoded over `context`."""

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """A measured transfer between GPU and host."""


class LinearCostModel:
    """Linear costs with a correction that follows what is measured (an exponentially weighted mean).

    Attention makes a prompt's cost grow with its context: `seconds_per_token_pair` times the tokens that each token sees.
    The defaults describe an 8-billion-parameter model on one large GPU. Measured times, given to `Scheduler.observe` and
    `observe_transfer`, correct them.

    >>> costs = LinearCostModel(prefill_seconds_per_token=1e-4, seconds_per_token_pair=0.0)
    >>> costs.observe_step([(100, 0)], 0, 0, seconds=0.02)  # twice as slow as thought: the next guess moves towards it
    >>> round(costs.prefill_seconds(100, 0), 4)
    0.012
    """

    def __init__(
        self,
        *,
        prefill_seconds_per_token: float = 4e-5,
        seconds_per_token_pair: float = 1e-9,
        decode_seconds_per_step: float = 5e-3,
        decode_seconds_per_sequence: float = 1e-5,
        decode_seconds_per_context_token: float = 3e-8,
        transfer_latency: float = 2e-5,
        transfer_bytes_per_second: float = 2e10,
        smoothing: float = 0.2,
    ) -> None:
        positive = {"transfer_bytes_per_second": transfer_bytes_per_second, "smoothing": smoothing}
        others = {
            "prefill_seconds_per_token": prefill_seconds_per_token,
            "seconds_per_token_pair": seconds_per_token_pair,
            "decode_seconds_per_step": decode_seconds_per_step,
            "decode_seconds_per_sequence": decode_seconds_per_sequence,
            "decode_seconds_per_context_token": decode_seconds_per_context_token,
            "transfer_latency": transfer_latency,
        }
        for name, value in (positive | others).items():
            expected = "a number over 0" if name in positive else "a number, 0 or more"
            number = value.item() if isinstance(value, np.generic) else value
            if check_number(number, name, expected, InvalidArgumentError) < 0 or (name in positive and value == 0):
                raise InvalidArgumentError(f"{name}={show(value)} must be {expected}")
        if smoothing > 1:
            raise InvalidArgumentError(
                f"smoothing must be at most 1 (believe only the last measurement), got {smoothing}"
            )
        self.prefill_seconds_per_token = prefill_seconds_per_token
        self.seconds_per_token_pair = seconds_per_token_pair
        self.decode_seconds_per_step = decode_seconds_per_step
        self.decode_seconds_per_sequence = decode_seconds_per_sequence
        self.decode_seconds_per_context_token = decode_seconds_per_context_token
        self.transfer_latency = transfer_latency
        self.transfer_bytes_per_second = transfer_bytes_per_second
        self.smoothing = smoothing
        self.prefill_scale = self.decode_scale = self.transfer_scale = 1.0  # measured over predicted

    def prefill_seconds(self, num_tokens: int, context: int) -> float:
        pairs = num_tokens * (context + (num_tokens + 1) / 2)
        seconds = num_tokens * self.prefill_seconds_per_token + pairs * self.seconds_per_token_pair
        return self.prefill_scale * seconds

    def decode_seconds(self, num_sequences: int, context: int) -> float:
        if not num_sequences:
            return 0.0
        seconds = self.decode_seconds_per_step + num_sequences * self.decode_seconds_per_sequence
        return self.decode_scale * (seconds + context * self.decode_seconds_per_context_token)

    def transfer_seconds(self, num_bytes: int) -> float:
        if not num_bytes:
            return 0.0
        return self.transfer_scale * (self.transfer_latency + num_bytes / self.transfer_bytes_per_second)

    def observe_step(
        self, prefills: Sequence[tuple[int, int]], num_sequences: int, context: int, seconds: float
    ) -> None:
        """A step that only decodes corrects the decode cost. Of other steps, what exceeds it corrects the prefill cost."""
        decode = self.decode_seconds(num_sequences, context)
        if not prefills:
            self.decode_scale *= self._correction(seconds, decode)
        else:
            predicted = sum(self.prefill_seconds(num_tokens, before) for num_tokens, before in prefills)
            self.prefill_scale *= self._correction(seconds - decode, predicted)

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """A measured transfer between GPU and host."""
        self.transfer_scale *= self._correction(seconds, self.transfer_seconds(num_bytes))

    def _correction(self, measured: float, predicted: float) -> float:
        if not (0 < measured < inf and predicted > 0):  # nothing ran, or the clock did not move
            return 1.0
        return 1.0 + self.smoothing * (measured / predicted - 1.0)


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
    layers: tuple[LayerSpec | StateSpec, ...]
    costs: LinearCostModel
    errors: Mapping[str, float]  # median relative error of the costs in the steps they were fitted to

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; `read_costs` reads it back."""
        plain = {name: getattr(self, name) for name in ("machine", "memory_bytes", "model", "parameters")}
        return plain | {
            "format": FORMAT,
            "layers": [described(layer) for layer in self.layers],
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
        memory_bytes=check_int(plain["memory_bytes"], "memory_bytes", 1, MAX_BYTES),
        model=_name(plain, "model"),
        parameters=check_int(plain["parameters"], "parameters", 1, MAX_BYTES),
        layers=tuple(map(_layer, plain["layers"])),
        costs=LinearCostModel(**{name: check_number(plain["costs"][name], name, "a number") for name in COSTS}),
        errors={str(name): check_number(value, name, "a number") for name, value in plain.get("errors", {}).items()},
    )


def _layer(plain: Mapping[str, Any]) -> LayerSpec | StateSpec:
    if "parts" in plain:
        return StateSpec(tuple(StatePart(**part) for part in plain["parts"]))
    return LayerSpec(**plain)


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
