"""Layers that keep a state on a GPU: kernels on slots against torch and flash-linear-attention, and decode steps of models.

    python benchmarks/hybrid_gpu.py [--json FILE] [--only WORD] [--peers]

Prints JSON. Kernels update the states of four layers in turn, in a CUDA graph timed with events; a figure in TB/s is the
bytes of states that are read and written, over that time. Decode steps are those of models with random weights, bfloat16,
eight layers of the shape of Qwen3-Next (with a dense MLP) and of Falcon-H1-7B, through `StateStep.decoding` in a CUDA graph,
beside transformers' own static cache, eagerly, and with `--peers` compiled as `generate` does it and in a CUDA graph. Both
attend densely over as many places as the static cache has. `error` is the distance of logits behind some decoded tokens from
transformers', as a share of their spread.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpool import DType, StatePart, StateSpec
from kvpool.kernels import states as references
from kvpool.kernels.layout import PackedStates, Selection, SlotStates
from kvpool.kernels.states import convolve, convolve_one, delta_rule_one, select_one
from kvpool.model.forward import forward
from kvpool.model.hook import AttentionCall, use_kvpool_attention
from kvpool.model.probing import run_probe
from kvpool.model.state_probing import use_kvpool_states
from kvpool.model.state_steps import StateStep
from kvpool.model.states import own_states, state_specs
from kvpool.storage import StateSlots

LAYERS = 4  # whose states the kernels update in turn: more than a cache holds
PLACES = 1024  # of keys and values that both sides attend over
PROMPT = 8
HALF = torch.bfloat16

Shape = tuple[str, dict[str, Any]]
QWEN: Shape = ("qwen3_next", dict(num_hidden_layers=8, mlp_only_layers=list(range(8)), vocab_size=32000))
FALCON: Shape = (
    "falcon_h1",
    dict(
        num_hidden_layers=8,
        hidden_size=3072,
        intermediate_size=12288,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        mamba_d_ssm=3072,
        mamba_n_heads=24,
        mamba_d_head=128,
        mamba_n_groups=2,
        mamba_d_state=256,
        vocab_size=32000,
    ),
)


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The shortest of a few measurements of a call that only launches."""
    best = float("inf")
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3 / repeats)
    return best


def graph_of(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call, and what the call returns, which every replay fills anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return graph, made


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


class Layers:
    """States of a few layers in one store, as an engine has them."""

    def __init__(self, part: StatePart, batch: int) -> None:
        self.bytes = 2 * batch * part.bytes  # of one layer, read and written
        self.slots = StateSlots.allocate({i: StateSpec((part,)) for i in range(LAYERS)}, batch + 1, "cuda")
        for i in range(LAYERS):
            self.slots.store.views(0)[i, part.name].normal_()
        rows = torch.randperm(batch, device="cuda")
        self.states = [self.slots.at(i, part.name, rows, rows) for i in range(LAYERS)]

    def copied(self) -> SlotStates:
        """The first layer's states elsewhere."""
        first = self.states[0]
        return SlotStates(first.stored.clone(), first.sources, first.targets)


def kernel_case(
    part: StatePart, batch: int, kernel: Callable[[SlotStates], Tensor], reference: Callable[[SlotStates], Tensor]
) -> dict[str, float]:
    layers = Layers(part, batch)
    ours, theirs = layers.copied(), layers.copied()
    found, expected = kernel(ours).float(), reference(theirs).float()
    state_error = (ours.stored.float() - theirs.stored.float()).abs().max()
    graph, _ = graph_of(lambda: [kernel(states) for states in layers.states])
    taken = seconds(graph.replay) / LAYERS
    plain, _ = graph_of(lambda: [reference(states) for states in layers.states])
    return {
        "error": float((found - expected).abs().max() / expected.std()),
        "state_error": float(state_error),
        "us": taken * 1e6,
        "TB/s": layers.bytes / taken / 1e12,
        "torch_us": seconds(plain.replay, 3) / LAYERS * 1e6,
    }


def convolution(batch: int) -> dict[str, float]:
    x, weight, bias = random(batch, 8192), random(8192, 4), random(8192)
    part = StatePart("conv", (8192, 4), DType.BFLOAT16)
    return kernel_case(
        part,
        batch,
        lambda s: convolve_one(x, s, weight, bias, True),
        lambda s: references.convolve_one_reference(x, s, weight, bias, True),
    )


def packed_convolution(batch: int) -> dict[str, float]:
    """8,192 tokens of several sequences; the bytes are those of the tokens, read and written."""
    tokens, part = 8192, StatePart("conv", (8192, 4), DType.BFLOAT16)
    x, weight, bias = random(tokens, 8192), random(8192, 4), random(8192)
    starts = torch.arange(0, tokens + 1, tokens // batch, device="cuda")
    layers = Layers(part, batch)

    def packed() -> PackedStates:
        states = layers.copied()
        lengths = (tokens // batch,) * batch
        return PackedStates(states.stored, states.sources, states.targets, starts, lengths)

    ours, theirs = packed(), packed()
    found = convolve(x, ours, weight, bias, True).float()
    expected = references.convolve_reference(x, theirs, weight, bias, True).float()
    graph, _ = graph_of(lambda: convolve(x, ours, weight, bias, True))
    taken = seconds(graph.replay)
    return {
        "error": float((found - expected).abs().max() / expected.std()),
        "state_error": float((ours.stored.float() - theirs.stored.float()).abs().max()),
        "us": taken * 1e6,
        "TB/s": 2 * x.nbytes / taken / 1e12,
    }


def delta_rule(batch: int) -> dict[str, float]:
    q, k, v = (random(batch, 32, 128) for _ in range(3))
    decay, beta = -torch.rand(batch, 32, device="cuda"), torch.rand(batch, 32, device="cuda").to(HALF)
    part = StatePart("recurrent", (32, 128, 128), DType.FLOAT32)
    case = kernel_case(
        part,
        batch,
        lambda s: delta_rule_one(q, k, v, decay, beta, s, True),
        lambda s: references.delta_rule_one_reference(q, k, v, decay, beta, s, True),
    )
    if batch > 64:  # its kernel accesses memory illegally then (0.6.0, 256 sequences, H200)
        return case
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError:
        return case
    states = [torch.randn(batch, 32, 128, 128, device="cuda") for _ in range(LAYERS)]
    given = [x.unsqueeze(1) for x in (q, k, v, decay, beta)]

    def fla() -> None:
        for state in states:
            fused_recurrent_gated_delta_rule(
                *given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
            )

    graph, _ = graph_of(fla)
    taken = seconds(graph.replay) / LAYERS
    return {**case, "fla_us": taken * 1e6, "fla_TB/s": 2 * states[0].nbytes / taken / 1e12}


def selection(batch: int) -> dict[str, float]:
    heads, channels, size, groups = 24, 128, 256, 2
    x, z = random(batch, heads, channels), random(batch, heads, channels)
    dt = random(batch, heads, 1).expand(-1, -1, channels)
    a = -torch.rand(heads, 1, 1, device="cuda").expand(-1, channels, size)
    b, c = random(batch, groups, size), random(batch, groups, size)
    d, bias = random(heads, 1).expand(-1, channels), random(heads, 1).expand(-1, channels)
    chosen = Selection(dt, a, b, c, d, bias, True)
    return kernel_case(
        StatePart("recurrent", (heads, channels, size), DType.FLOAT32),
        batch,
        lambda s: select_one(x, chosen, s, z),
        lambda s: references.select_one_reference(x, chosen, s, z),
    )


class DenseAttention:
    """Keys and values in one tensor for each layer, as the static cache keeps them."""

    def __init__(self, batch: int, positions: Tensor) -> None:
        self.batch, self.positions = batch, positions  # [sequence, token]
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.places = torch.arange(PLACES, device="cuda")

    def __call__(self, call: AttentionCall) -> Tensor:
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (call.q, call.k, call.v))
        if call.layer not in self.kept:
            empty = torch.zeros(self.batch, k.shape[1], PLACES, k.shape[3], dtype=k.dtype, device=k.device)
            self.kept[call.layer] = empty, empty.clone()
        for kept, new in zip(self.kept[call.layer], (k, v), strict=True):
            at = self.positions[:, None, :, None].expand_as(new)
            kept.scatter_(2, at, new)
        mask = self.places <= self.positions[:, None, :, None]
        out = scaled_dot_product_attention(q, *self.kept[call.layer], attn_mask=mask, scale=call.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class Ours:
    """A model in flattened steps with its states in slots."""

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self.batch = model, batch
        assert use_kvpool_attention(model)
        modules = use_kvpool_states(model, lambda: run_probe(model))
        self.on_slots = all(module.on_slots and module.packs for module in modules)
        self.slots = StateSlots.allocate(state_specs(modules), batch + 1, "cuda")
        self.ids = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.rows = torch.arange(batch, device="cuda")
        self.attention = DenseAttention(batch, self.positions[:, None])

    def prompt(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        places = torch.arange(count, device="cuda").repeat(self.batch, 1)
        self.attention.positions = places
        step = StateStep.of(self.slots, [count] * self.batch, [-1] * self.batch, range(self.batch))
        logits = forward(self.model, tokens.flatten(), places.flatten(), None, self.attention, step)
        self.attention.positions = self.positions[:, None]
        self.positions.fill_(count)
        return logits.view(self.batch, count, -1)[:, -1]

    def decode(self) -> Tensor:
        step = StateStep.decoding(self.slots, self.rows, self.rows)
        return forward(self.model, self.ids, self.positions, None, self.attention, step)

    def close(self) -> None:
        own_states(self.model)
        self.model.set_attn_implementation("sdpa")


class Transformers:
    """The same model with transformers' static cache."""

    def __init__(self, model: Any, batch: int) -> None:
        from transformers import StaticCache

        model.set_attn_implementation("sdpa")
        self.model, self.batch = model, batch
        self.cache = StaticCache(config=model.config, max_cache_len=PLACES)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        self.call: Callable[..., Any] = model

    @torch.no_grad()
    def prompt(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device="cuda")[None]
        logits: Tensor = self.model(
            tokens, position_ids=places, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        self.positions.fill_(tokens.shape[1])
        return logits[:, -1]

    @torch.no_grad()
    def decode(self) -> Tensor:
        logits: Tensor = self.call(
            self.ids, position_ids=self.positions, past_key_values=self.cache, use_cache=True
        ).logits
        return logits[:, -1]


def attempt(run: Callable[[], float]) -> float | str:
    """A time in milliseconds, or why there is none."""
    try:
        return run() * 1e3
    except Exception as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error)[:200]}"


def decode_case(shape: Shape, batch: int) -> dict[str, Any]:
    model = random_model(shape)
    text = torch.randint(3, 32000, (batch, PROMPT + 3), device="cuda")
    ours = Ours(model, batch)
    ours.prompt(text[:, :PROMPT])
    graph, logits = graph_of(ours.decode)
    found = [ours.prompt(text[:, :PROMPT])]  # again: the graph was tried out
    for i in range(3):
        ours.ids.copy_(text[:, PROMPT + i])
        graph.replay()
        found.append(logits.clone())
        ours.positions += 1
    result: dict[str, Any] = {
        "kvpool_graph_ms": seconds(graph.replay) * 1e3,
        "kvpool_eager_ms": seconds(ours.decode, 3) * 1e3,
        "on_slots": ours.on_slots,
        "state_bytes": ours.slots.store.data.shape[1],
    }
    ours.close()
    print(result, file=sys.stderr, flush=True)
    theirs = Transformers(model, batch)
    expected = [theirs.prompt(text[:, :PROMPT])]
    for i in range(3):
        theirs.ids.copy_(text[:, PROMPT + i : PROMPT + i + 1])
        expected.append(theirs.decode().clone())
        theirs.positions += 1
    result["transformers_eager_ms"] = attempt(lambda: seconds(theirs.decode, 3))
    result["errors"] = [
        float((a.float() - b.float()).abs().max() / b.float().std()) for a, b in zip(found, expected, strict=True)
    ]
    return result


def peer_case(shape: Shape, batch: int) -> dict[str, Any]:
    """Transformers' own step in a graph, and compiled as `generate` does it."""
    model = random_model(shape)
    theirs = Transformers(model, batch)
    theirs.prompt(torch.randint(3, 32000, (batch, PROMPT), device="cuda"))
    theirs.call = torch.compile(model, mode="reduce-overhead")

    def compiled() -> float:
        for _ in range(4):
            theirs.decode()
        return seconds(theirs.decode, 10)

    result = {"transformers_compiled_ms": attempt(compiled)}
    theirs.call = model
    result["transformers_graph_ms"] = attempt(lambda: seconds(graph_of(theirs.decode)[0].replay))
    return result


def prompt_case(shape: Shape) -> dict[str, Any]:
    """A prompt of as many tokens as both caches have places, all in one step."""
    model = random_model(shape)
    text = torch.randint(3, 32000, (1, PLACES), device="cuda")
    theirs = Transformers(model, 1)
    expected = theirs.prompt(text)

    def again() -> None:
        theirs.cache.reset()
        theirs.prompt(text)

    taken = attempt(lambda: seconds(again, 2))
    ours = Ours(model, 1)
    found = ours.prompt(text)
    result = {
        "transformers_ms": taken,
        "kvpool_ms": seconds(lambda: ours.prompt(text), 2) * 1e3,
        "error": float((found.float() - expected.float()).abs().max() / expected.float().std()),
    }
    ours.close()
    return result


def random_model(shape: Shape) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[shape[0]](**shape[1]), dtype=HALF).eval()


def cases(with_peers: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for shape in (QWEN, FALCON):
        for batch in (1, 64):
            found[f"decode {shape[0]}, {batch}"] = partial(decode_case, shape, batch)
            if with_peers:
                found[f"peer {shape[0]}, {batch}"] = partial(peer_case, shape, batch)
        found[f"prompt {shape[0]}, {PLACES}"] = partial(prompt_case, shape)
    kernels: Sequence[tuple[str, Callable[[int], dict[str, float]], tuple[int, ...]]] = (
        ("convolution of one token", convolution, (1, 64, 256)),
        ("packed convolution", packed_convolution, (1, 16)),
        ("state space model", selection, (1, 64)),
        ("gated delta rule", delta_rule, (1, 64, 256)),
    )
    for name, run, batches in kernels:
        for batch in batches:
            found[f"{name}, {batch}"] = partial(run, batch)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--peers", action="store_true", help="also capture and compile transformers' own step: minutes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("hybrid_gpu.py needs a GPU: torch finds none")
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, run in cases(options.peers).items():
        if options.only in name:
            began = time.perf_counter()
            try:
                results[name] = run()
            except Exception as error:  # the others still say something
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
            results[name]["case_s"] = round(time.perf_counter() - began, 1)
            print(json.dumps({name: results[name]}), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
