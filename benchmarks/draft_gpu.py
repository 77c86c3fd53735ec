"""Decoding with a draft model beside decoding without: tokens a second of one sequence and of eight.

python benchmarks/draft_gpu.py            # the shapes of Llama 3.1 8B and Llama 3.2 1B with random weights, on a GPU
python benchmarks/draft_gpu.py --tiny     # a few small layers, on a CPU: whether it runs

Random models agree on nothing, so both are made to say something: behind token t the model says p(t), for a random
permutation p. Its head has the embedding of t as the row of p(t), and its layers add little to it. The draft is made in
the same way, but for a share of the tokens it says another one. All layers of both are computed as in any model.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from kvpool.engine import Chunk, Engine, SamplingParams
from kvpool.model.loading import load_model
from kvpool.scheduling import SchedulerConfig

COMMON = {"model_type": "llama", "num_key_value_heads": 8, "num_attention_heads": 32, "tie_word_embeddings": False}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
TINY_DRAFT = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 1000}


@torch.no_grad()
def speaking(shape: dict[str, Any], says: Tensor) -> Any:
    """A model of random weights that says `says[t]` behind token t."""
    model = load_model({**COMMON, **shape, "max_position_embeddings": 8192}).model
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.01)
    embeddings = model.get_input_embeddings().weight.normal_()
    head = model.get_output_embeddings().weight.zero_()
    head.index_add_(0, says.to(head.device), embeddings / shape["hidden_size"] ** 0.5)
    return model


def measured(engine: Engine, batch: int, num_tokens: int, says: Tensor, **sampling: Any) -> float:
    """New tokens a second, the better of two runs behind one that warms up; checks what the model says.

    Time runs from the chunk on that makes as many chunks as sequences. Of a larger batch, some prompts are computed later.
    """
    params, best = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **sampling), 0.0
    for turn in range(3):
        generator = torch.Generator().manual_seed(turn)
        prompts = torch.randint(len(says), (batch, 256), generator=generator).tolist()
        firsts: list[float] = []

        def note(chunk: Chunk, times: list[float] = firsts) -> None:
            times.append(time.perf_counter())

        running = [engine.submit(prompt, params, on_chunk=note) for prompt in prompts]
        results = [generation.result() for generation in running]
        ended = time.perf_counter()
        for prompt, result in zip(prompts, results, strict=True):
            before = torch.tensor([prompt[-1], *result.token_ids[:-1]])
            if says[before].tolist() != result.token_ids:
                raise AssertionError("the model does not say what it should")
        if turn:
            best = max(best, batch * (num_tokens - 1) / (ended - firsts[batch - 1]))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--draft-tokens", type=int, default=None)
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers of both models")
    given = parser.parse_args()
    shape, draft_shape = (TINY, TINY_DRAFT) if given.tiny else (LARGE, SMALL)
    generator = torch.Generator().manual_seed(0)
    says = torch.randperm(shape["vocab_size"], generator=generator)
    model = speaking(shape, says)
    limits = SchedulerConfig(max_sequences=8, max_tokens_per_step=512)
    options: dict[str, Any] = {
        "kv_bytes": 2**27 if given.tiny else 2**33,
        "scheduler": limits,
        "compile": given.compile,
    }
    plain: dict[tuple[str, int], float] = {}
    for agreement in (None, 0.7, 0.0):
        name, draft = "without a draft", None
        if agreement is not None:
            agrees = torch.rand(len(says), generator=generator) < agreement
            draft = speaking(draft_shape, torch.where(agrees, says, (says + 1) % len(says)))
            name = f"a draft that agrees {agreement:.0%}"
        drafting = {} if draft is None else {"draft": draft, "draft_tokens": given.draft_tokens}
        with Engine(model, **options, **drafting) as engine:
            engine.warm_up()
            for batch in (1, 8):
                for how, sampling in (("greedy", {}), ("sampled", {"temperature": 1.0, "seed": 1})):
                    before = engine.stats().scheduler
                    speed = measured(engine, batch, given.tokens, says, **sampling)
                    after, drafts = engine.stats().scheduler, engine.stats().drafts
                    base = plain.setdefault((how, batch), speed)
                    line = f"{name}, batch {batch}, {how}: {speed:.0f} tokens/s, {speed / base:.2f} times"
                    if drafts is not None:
                        verified = after.draft_tokens - before.draft_tokens
                        accepted = after.accepted_draft_tokens - before.accepted_draft_tokens
                        line += (
                            f"; drafts of {drafts.length} tokens, {drafts.acceptance:.2f} right if those before are, "
                        )
                        line += f"{accepted} of {verified} accepted"
                    print(line, flush=True)


if __name__ == "__main__":
    main()
