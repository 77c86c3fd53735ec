"""Tries every language model family of transformers in the engine, and writes the table of benchmarks/figures/families.md.

`make models` does it (some minutes on two cores). For each family a tiny model with random weights answers a few prompts,
in chunks, in one batch and again from the prefix cache. Its tokens must be those of transformers' own `generate`, and their
log probabilities, too. A model whose answers are alike proves nothing: it counts as not tried.

    python tools/families.py --only llama,bloom     two families, on the terminal
    python tools/families.py --json                 all of them, one JSON object
    python tools/families.py --write                the table, into benchmarks/figures/families.md
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    set_seed,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvpool.engine import Completion, Engine, SamplingParams
from kvpool.errors import KVPoolError, UnsupportedModelError
from kvpool.scheduling import SchedulerConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "model"), str(ROOT / "tests" / "engine")]

import vision_models  # type: ignore[import-not-found]  # noqa: E402
from hybrids import HYBRIDS  # type: ignore[import-not-found]  # noqa: E402

PAGE = ROOT / "benchmarks" / "figures" / "families.md"
BEGIN, END = "<!-- families: written by `make models` -->", "<!-- families: end -->"

LAYERS, VOCABULARY, WINDOW, CHUNK = 4, 160, 24, 16
PROMPT_LENGTHS, NEW_TOKENS = (61, 18, 7), 12
MOST_DIFFERENCE = 1e-3  # of log probabilities
ALIKE = "its answers to all prompts are alike"
MOST_GROWTHS = 4  # of weights, until answers differ
MAX_PARAMETERS = 20_000_000  # a model that is larger than this is not tiny: a size was not found

# What sizes are called. Every configuration gets those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"], 64),
    **dict.fromkeys(["embed_dim", "out_hidden_size", "projection_dim", "hidden_dim", "output_dim"], 64),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"], 96),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"], LAYERS),
    **dict.fromkeys(["n_layers", "depth", "num_decoder_layers"], LAYERS),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "dim_head"], 16),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"], 512),
    **dict.fromkeys(["sliding_window", "window_size", "attention_chunk_size", "sliding_window_size"], WINDOW),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["shared_intermediate_size", "intermediate_size_mlp", "dense_intermediate_size"], 64),
    **dict.fromkeys(["n_group", "topk_group"], 1),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    **dict.fromkeys(["pad_token_id"], 0),
    **dict.fromkeys(["bos_token_id"], 1),
    **dict.fromkeys(["eos_token_id", "decoder_start_token_id"], 2),
    "is_decoder": True,
    "tie_word_embeddings": False,
    **dict.fromkeys(["image_size"], 16),
    **dict.fromkeys(["patch_size"], 4),
    "initializer_range": 0.15,  # so that attention is not nearly uniform, and layers are not nearly the identity
    "init_std": 0.15,
}

# Sizes that a family may leave out: None then means that it has no such thing.
OPTIONAL = ("sliding_window", "window_size", "q_lora_rank", "n_inner", "moe_intermediate_size", "attention_chunk_size")


def _divided(*sections: int) -> dict[str, Any]:
    """Rotary embeddings whose halves of a head are divided between so many axes of positions."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections]}}


# What else single families need.
_ROTARY = {"rotary_dim": 8}
_AUDIO = {"vision_start_token_id": VOCABULARY - 1, "audio_start_token_id": VOCABULARY - 2}
_GLOBAL_HEADS = {"global_head_dim": 16, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 8}
OWN: dict[str, dict[str, Any]] = {
    **{name: _divided(2, 3, 3) for name in ("glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "qwen2_5_omni_text")},
    "glm4v_moe_text": _divided(1, 1, 2) | {"partial_rotary_factor": 0.5},
    "ernie4_5_vl_moe_text": _divided(3, 3, 2),
    "hunyuan_vl_text": _divided(2, 2, 2, 2),
    "gemma3n_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "xmod": {"default_language": "en_XX"},
    "qwen2_5_omni_thinker": _AUDIO,
    "qwen3_omni_moe_thinker": _AUDIO,
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 16, "indexer_compress_ratio": 4},
    },
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "codegen": _ROTARY,
    "dots1": {"n_shared_experts": 1, "moe_intermediate_size": 32},
    "gptj": _ROTARY,
    "gemma4_text": _GLOBAL_HEADS,
    "gemma4_unified_text": _GLOBAL_HEADS,
    "exaone4_5": {"image_token_id": VOCABULARY - 1, "video_token_id": VOCABULARY - 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "longcat_flash": {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32)},
    "xlm": {"emb_dim": 64, "n_words": VOCABULARY},
    **HYBRIDS,
}


@dataclass(frozen=True)
class Outcome:
    """What became of a family."""

    family: str
    takes_images: bool
    result: str  # equal, different, refused or untried
    reason: str = ""  # why not equal
    images: str = ""  # equal or refused; empty: not tried


class Answer(NamedTuple):
    """The tokens of an answer, and how likely each of them was."""

    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        return cls(list(completion.token_ids), [each.logprob for each in completion.samples[0].logprobs])

    def differs(self, other: Answer) -> bool:
        return self.tokens != other.tokens

    def is_far_from(self, other: Answer) -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(one - two) for one, two in pairs) > MOST_DIFFERENCE


# --- tiny models ------------------------------------------------------------------------------------------------------


def tiny_config(family: str) -> Any:
    """A configuration of a family in which every size that is known by name is small."""
    kind = CONFIG_MAPPING[family]
    return kind(**_sizes(kind()))


def _sizes(config: Any) -> dict[str, Any]:
    """The small sizes of a default configuration and its parts. What is None or a list there stays as it is."""
    known = inspect.signature(type(config).__init__).parameters
    given = {name: vars(config).get(name, 0) for name in SIZES if name in known}
    small = {
        name: SIZES[name]
        for name, value in given.items()
        if not isinstance(value, (list, tuple, dict)) and not (value is None and name in OPTIONAL)
    }
    if "kv_lora_rank" in small:  # of these, rotary embeddings get a head of the size below
        small |= {"num_key_value_heads": small["num_attention_heads"], "head_dim": small["qk_rope_head_dim"]}
        small = {name: value for name, value in small.items() if name in known}
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if kinds and "layer_types" in known:
        small["layer_types"] = [kinds[layer % len(kinds)] for layer in range(small.get("num_hidden_layers", LAYERS))]
    for part in type(config).sub_configs:
        if isinstance(inner := getattr(config, part, None), transformers.PretrainedConfig):
            small[part] = _sizes(inner) | {"model_type": inner.model_type}
    return small | OWN.get(config.model_type, {})


def tiny_model(family: str, takes_images: bool) -> Any:
    """A model with random weights in float32, with eager attention, in eval mode."""
    auto = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    return _built(auto, tiny_config(family))


def _built(auto: Any, config: Any) -> Any:
    with torch.device("meta"):
        size = sum(weight.numel() for weight in auto.from_config(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the tiny configuration has {size:,} parameters")
    set_seed(0)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


# --- trying -----------------------------------------------------------------------------------------------------------


def tried(family: str, takes_images: bool) -> Outcome:
    """Builds a tiny model of a family and compares the engine's tokens with those of `generate`."""
    pictured = family in vision_models.CONFIGS
    try:
        model = vision_models.vision_model(family) if pictured else tiny_model(family, takes_images)
        prompts = _prompts()
        expected = _own_answers(model, prompts)
    except Exception as error:
        return Outcome(family, takes_images, "untried", _line(error))
    # A step computes prompts of PaliGemma whole, because their tokens see one another
    steps = SchedulerConfig(max_tokens_per_step=64 if family == "paligemma" else CHUNK, max_sequences=8)
    try:
        with Engine(model, block_size=8, kv_bytes=16 << 20, scheduler=steps, model_defaults=False) as engine:
            params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
            answers = [engine.generate(prompts, params) for _ in range(2)]  # the second finds prefixes
            images = _try_images(family, model, engine) if pictured else ""
    except UnsupportedModelError as error:
        return Outcome(family, takes_images, "refused", _reason(error))
    except KVPoolError as error:
        return Outcome(family, takes_images, "different", _line(error))
    got = [[Answer.of(completion) for completion in each] for each in answers]
    for what, differs in (("", Answer.differs), ("in log probabilities", Answer.is_far_from)):
        wrong = [any(map(differs, each, expected)) for each in got]
        if any(wrong):
            reason = " ".join([what, "from the prefix cache"] if wrong == [False, True] else [what]).strip()
            return Outcome(family, takes_images, "different", reason)
    if images == "different":
        return Outcome(family, takes_images, "different", "with images")
    if _are_alike(expected):
        return Outcome(family, takes_images, "untried", ALIKE)
    return Outcome(family, takes_images, "equal", images=images)


def _try_images(family: str, model: Any, engine: Engine) -> str:
    """Compares a prompt with two images, one of which is cut by a chunk: equal, different or refused."""
    given = vision_models.prompt(family, [5, 6, 7], 1, [8, 9, 10, 11], 2, [12])
    try:
        answer = engine.generate([given], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))[0].token_ids
    except KVPoolError:
        return "refused"
    return "equal" if answer == vision_models.own_answer(model, given, NEW_TOKENS) else "different"


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY - 10, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def _own_answer(model: Any, prompt: Sequence[int]) -> Answer:
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        forced_eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens: list[int] = out.sequences[0, -NEW_TOKENS:].tolist()
    rows = torch.cat(out.logits).float().log_softmax(dim=-1)
    return Answer(tokens, [row[token].item() for row, token in zip(rows, tokens, strict=True)])


def _own_answers(model: Any, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """What a model answers by itself. Its weights grow until it gives each prompt another answer, as far as they may."""
    answers = [_own_answer(model, prompt) for prompt in prompts]
    for _ in range(MOST_GROWTHS):
        if not _are_alike(answers):
            break
        for module in model.modules():
            if "Sinusoidal" not in type(module).__name__:  # these are large already
                for weight in module.parameters(recurse=False):
                    if weight.ndim > 1:
                        weight.data.mul_(2)
        answers = [_own_answer(model, prompt) for prompt in prompts]
    return answers


def _are_alike(answers: Sequence[Answer]) -> bool:
    """Whether a model gives two prompts the same answer, or says one token only."""
    tokens = {tuple(answer.tokens) for answer in answers}
    return len(tokens) < len(answers) or any(len(set(each)) == 1 for each in tokens)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# Why a model is refused, in few words, by what the error says.
_REASONS = {
    "AttentionInterface": "attention is computed without transformers' `AttentionInterface`",
    "takes no (.*): sequences": "`forward` takes no \\1",
    "has an encoder": "an encoder beside the decoder",
    "cannot be run: its own forward raised": "its own `forward` fails in a flattened step",
    "ALiBi": "slopes by distance (ALiBi) are added to scores",
    "indexer": "an indexer's keys in a form of its own",
    "mask or bias of its own": "a mask or bias of its own is added to attention",
    "computed attention": "a layer that does not compute attention exactly once",
    "layers of type ([^;]*);": "layers of type \\1",
    "recurrent state by itself": "a state that is kept outside of transformers' cache",
    "fails the self-check.*; (.*)": "self-check: \\1",
    "no language-model head": "no language-model head",
}


def _reason(error: UnsupportedModelError) -> str:
    for pattern, words in _REASONS.items():
        if found := re.search(pattern, str(error)):
            return found.expand(words)
    return _line(error)


def try_families(families: Iterable[str]) -> Iterator[Outcome]:
    """Tries one family after the other."""
    for family in families:
        with _quiet():
            outcome = tried(family, family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        yield outcome


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what transformers and tiny models warn about; some print it."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield


# --- the table --------------------------------------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome]) -> str:
    """The table of benchmarks/figures/families.md: families with the same result stand in one row."""
    rows: dict[str, list[str]] = {}
    for outcome in outcomes:
        rows.setdefault(_heading(outcome), []).append(outcome.family)
    ordered = sorted(rows.items(), key=lambda row: (_ORDER.index(row[0].split(":")[0]), -len(row[1]), row[0]))
    equal = sum(outcome.result == "equal" for outcome in outcomes)
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}: {len(outcomes)} families, "
        f"{equal} of them served with the tokens of `generate`.",
        "",
        "| result | families |",
        "|---|---|",
        *(f"| {heading} ({len(families)}) | {', '.join(sorted(families))} |" for heading, families in ordered),
    ]
    return "\n".join(lines)


_ORDER = [
    "equal tokens",
    "equal tokens, also with images",
    "other tokens",
    "refused",
    "not tried",
]


def _heading(outcome: Outcome) -> str:
    if outcome.result == "equal":
        return "equal tokens, also with images" if outcome.images == "equal" else "equal tokens"
    if outcome.reason == ALIKE:
        return f"not tried: {ALIKE}"
    if outcome.result == "untried":  # --json tells the reason of each
        return "not tried: the tiny model does not run in transformers by itself"
    words = {"different": "other tokens", "refused": "refused"}[outcome.result]
    return f"{words}: {outcome.reason.replace('|', '/')}" if outcome.reason else words


def written(page: str, rows: str) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="families, with commas between them; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    chosen = parser.parse_args(arguments)
    every = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    families = chosen.only.split(",") if chosen.only else every
    if unknown := sorted(set(families) - set(every)):
        parser.error(f"transformers {transformers.__version__} has no language model {', '.join(unknown)}")
    if chosen.only and chosen.write:
        parser.error("--write writes all families: leave --only out")
    outcomes = []
    for outcome in try_families(families):
        outcomes.append(outcome)
        print(f"{len(outcomes)}/{len(families)} {outcome.family}: {_heading(outcome)}", file=sys.stderr, flush=True)
    if chosen.json:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        print(json.dumps({**versions, "families": [asdict(outcome) for outcome in outcomes]}, indent=1))
    elif chosen.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table(outcomes)), encoding="utf-8")
    else:
        print(table(outcomes))
    return int(any(outcome.result == "different" for outcome in outcomes))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    logging.getLogger("kvpool").setLevel(logging.CRITICAL)
    sys.exit(main())
