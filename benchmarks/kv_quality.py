"""What keys and values in fewer bits cost: answers that stay as they are, and the perplexity of a text.

    python benchmarks/kv_quality.py --model DIR --text FILE    default: SmolLM2-135M-Instruct and docs/decisions

Weights are float32, on a CPU. An answer is 24 greedy tokens behind one of 20 beginnings of sentences.
"""

from __future__ import annotations

import argparse
import math
from itertools import takewhile
from pathlib import Path

from kvpool.engine import Engine, SamplingParams

BEGINNINGS = (
    *("The capital of France is", "Once upon a time there was a", "Water boils at a temperature of"),
    *("The three primary colours are", "In 1969, the first man", "A recipe for bread needs"),
    *("Photosynthesis is the process by which", "The best way to learn a language is", "def fibonacci(n):"),
    *("The largest planet in the solar system", "My favourite book is", "The history of Rome begins"),
    *("To be or not to be,", "The quick brown fox", "Machine learning is a field of", "Dear Sir or Madam,"),
    *("The population of China is", "If you want to stay healthy,", "A triangle has three"),
    "Shakespeare wrote many plays, among them",
)
DECISIONS = Path(__file__).parent.parent / "docs" / "decisions"
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
SCORED = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)


def main() -> None:
    """Prints a line for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--text", type=Path, nargs="*", default=sorted(DECISIONS.glob("000*.md")))
    parser.add_argument("--pieces", type=int, default=4, help="of 512 tokens each, of the text")
    given = parser.parse_args()
    wanted: list[list[int]] = []
    for kv_dtype in ("float32", "int8", "fp8_e4m3", "int4", "fp8_e5m2"):
        with Engine(given.model, device="cpu", dtype="float32", kv_dtype=kv_dtype, kv_bytes=2**28) as engine:
            answers = [out.token_ids for out in engine.generate(BEGINNINGS, GREEDY)]
            wanted = wanted or answers
            same = [_num_same(*pair) for pair in zip(answers, wanted, strict=True)]
            ids = engine.token_ids("\n".join(file.read_text() for file in given.text)).tolist()
            # Some models (Gemma) know no text without the token that begins it
            begin = ids[:1] if ids[:1] == [getattr(engine.tokenizer, "bos_token_id", None)] else []
            pieces = [begin + ids[at : at + 512] for at in range(len(begin), 512 * given.pieces, 512)]
            scores = [
                score.logprob for out in engine.generate(pieces, SCORED) for score in out.prompt_logprobs if score
            ]
        print(
            f"{kv_dtype:8}: {sum(n == GREEDY.max_new_tokens for n in same)} of {len(same)} answers the same, "
            f"{sum(same) / len(same):.1f} tokens before the first difference, "
            f"perplexity {math.exp(-sum(scores) / len(scores)):.3f} of {len(scores)} tokens",
            flush=True,
        )


def _num_same(answer: list[int], wanted: list[int]) -> int:
    """How many tokens an answer begins with that are those of another."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, wanted, strict=True)))


if __name__ == "__main__":
    main()
