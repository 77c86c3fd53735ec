"""Samples one token for each row of a batch at once. Each row may have parameters of its own.

A row's token depends on its logits, its parameters and one number in [0, 1). That number is a pure function of the row's
seed and of how many tokens it has sampled, so neither the rest of the batch nor preemption changes what a seed produces.
`StepSampler` knows which parameters belong to which row of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from kvpool.engine.generation import Generation
from kvpool.engine.grammar import num_words
from kvpool.engine.params import SamplingParams
from kvpool.engine.scoring import TokenLogprob
from kvpool.engine.step_part import StepPart
from kvpool.errors import StepError
from kvpool.pools.arrays import Int64Array, within
from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.scheduling.request import ScheduledSequence
from kvpool.storage.moving import upload


class Sampled(NamedTuple):
    """One token per row. If any row asks for log probabilities, the tensors hold those of all rows."""

    tokens: Tensor  # [rows] int64
    logprobs: Tensor | None = None  # [rows] of the token
    top_logprobs: Tensor | None = None  # [rows, the largest number that a row asks for]
    top_tokens: Tensor | None = None

    def to_host(self) -> Sampled:
        """A copy for the host. It is complete once the device has done the copy."""
        return Sampled(*(None if part is None else part.to("cpu", non_blocking=True) for part in self))  # type: ignore[arg-type]

    def entries(self, rows: Int64Array, tokens: Sequence[int], num_top: int | None) -> list[TokenLogprob]:
        """The log probabilities of these tokens, one of each row, and of the `num_top` best ones; None: nobody asked.

        The tensors are on the host.
        """
        if num_top is None:
            return []
        assert self.logprobs is not None
        entries = []
        for row, token in zip(rows.tolist(), tokens, strict=True):
            top: tuple[tuple[int, float], ...] = ()
            if num_top and self.top_tokens is not None and self.top_logprobs is not None:
                best = self.top_tokens[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist()
                top = tuple(zip(*best, strict=True))
            entries.append(TokenLogprob(token, float(self.logprobs[row]), top))
        return entries


class SamplingRows:
    """The parameters of a batch's rows as tensors. They are made when the batch changes, and used for many steps.

    `greedy` means that every row takes the argmax. Then sampling reads no tensor but the logits.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.device = device
        self.greedy = all(p.is_greedy for p in params)
        self.filtered = any(p.is_filtered and not p.is_greedy for p in params)
        self.penalised = any(p.has_penalties for p in params)
        self.num_logprobs = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        if not self.greedy:
            self.temperature = self._column([p.temperature or 1.0 for p in params])
            self.is_greedy = self._tensor([p.is_greedy for p in params], np.bool_)
        if self.filtered:
            # The filters of a greedy row keep everything: argmax chooses its token.
            self.top_k = self._tensor([p.top_k or 2**31 - 1 for p in params], np.int64).unsqueeze(1)
            self.top_p = self._column([p.top_p or 1.0 for p in params])
            self.min_p = self._column([p.min_p or 0.0 for p in params])
        if self.penalised:
            self.repetition = self._column([p.repetition_penalty or 1.0 for p in params])
            self.presence = self._column([p.presence_penalty for p in params])
            self.frequency = self._column([p.frequency_penalty for p in params])
        biased = [(row, token, value) for row, p in enumerate(params) for token, value in p.logit_bias.items()]
        self.bias_at: tuple[Tensor, Tensor] | None = None
        if biased:
            rows, tokens, values = zip(*biased, strict=True)
            self.bias_at = (self._tensor(rows, np.int64), self._tensor(tokens, np.int64))
            self.bias = self._tensor(values, np.float32)

    def _column(self, values: list[float]) -> Tensor:
        return self._tensor(values, np.float32).unsqueeze(1)

    def _tensor(self, values: Sequence[float], dtype: npt.DTypeLike) -> Tensor:
        return upload(np.array(values, dtype), self.device)


class TokenMask(NamedTuple):
    """Which tokens the rows at `rows` may choose: one bit each, as `kvpool.engine.grammar` writes them."""

    rows: Tensor  # [masked rows] int64
    words: Tensor  # [masked rows, words] int32

    def applied(self, scores: Tensor) -> Tensor:
        """The scores, with minus infinity for tokens that may not be chosen."""
        # A byte of the mask is the index of eight additions in a table. On a CPU it takes a fifth of `masked_fill`'s time.
        table = upload(_BIAS_OF_BYTE, scores.device)
        bias = functional.embedding(self.words.view(torch.uint8).int(), table).view(len(self.words), -1)
        return scores.index_add(0, self.rows, bias[:, : scores.shape[1]].to(scores.dtype))


_BIAS_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
)
_BIAS_OF_BYTE = _BIAS_OF_BYTE.astype(np.float32)


class TokenCounts:
    """Which tokens each row has in its prompt (yes or no) and in its output (how often). For penalties only."""

    def __init__(self, num_rows: int, vocabulary: int, device: torch.device) -> None:
        self.output = torch.zeros((num_rows, vocabulary), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((num_rows, vocabulary), dtype=torch.bool, device=device)

    def start(self, row: int, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> None:
        """Sets the counts of a row to those of its prompt and output."""
        self.output[row] = 0
        self.prompt[row] = False
        device = self.output.device
        self.prompt[row].index_fill_(0, upload(prompt.astype(np.int64), device), True)
        if len(output):
            tokens = upload(output.astype(np.int64), device)
            self.output[row].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Counts one more sampled token for each of these rows."""
        self.output.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)


def sample(
    logits: Tensor,
    rows: SamplingRows,
    uniforms: Tensor | None = None,
    counts: TokenCounts | None = None,
    count_rows: Tensor | None = None,
    mask: TokenMask | None = None,
    process: Callable[[Tensor], Tensor] | None = None,
) -> Sampled:
    """One token for each row of `logits` [rows, vocabulary].

    `uniforms` [rows] come from `uniforms_for`; they may be None if every row is greedy. If a row has penalties, `counts` has
    its counts, and `count_rows` says where. `mask` is for rows that may not choose every token. `process` are logits
    processors.
    """
    scores = logits
    changed = rows.penalised or rows.bias_at is not None or process is not None
    if rows.num_logprobs is not None or not rows.greedy or changed:
        scores = logits.float()
    raw = scores
    if rows.penalised:
        assert counts is not None and count_rows is not None
        scores = _penalise(scores, rows, counts, count_rows)
    if rows.bias_at is not None:
        scores = scores.index_put(rows.bias_at, rows.bias, accumulate=True)
    if process is not None:
        scores = process(scores)
    if mask is not None:
        scores = mask.applied(scores)
    tokens = _choose(scores, rows, uniforms)
    if rows.num_logprobs is None:
        return Sampled(tokens)
    logprobs = raw.log_softmax(-1)
    top = logprobs.topk(min(rows.num_logprobs, logprobs.shape[1]), dim=-1) if rows.num_logprobs else None
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Sampled(tokens, chosen, top.values if top else None, top.indices if top else None)


def _likeliest(scores: Tensor) -> Tensor:
    """The `argmax` of each row, the first of equals. On a CPU numpy takes a tenth of torch's time."""
    if scores.device.type == "cpu" and scores.dtype is torch.float32:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _penalise(scores: Tensor, rows: SamplingRows, counts: TokenCounts, count_rows: Tensor) -> Tensor:
    output = counts.output[count_rows]
    produced = output > 0
    seen = produced | counts.prompt[count_rows]
    weaker = torch.where(scores < 0, scores * rows.repetition, scores / rows.repetition)
    scores = torch.where(seen, weaker, scores)
    return scores - rows.presence * produced - rows.frequency * output


def _choose(scores: Tensor, rows: SamplingRows, uniforms: Tensor | None) -> Tensor:
    """The token of each row, drawn from what the filters leave."""
    likeliest = _likeliest(scores)
    if rows.greedy:
        return likeliest
    assert uniforms is not None
    scores = scores / rows.temperature
    if rows.filtered:
        scores = scores.masked_fill(scores < _lowest_kept(scores, rows), -torch.inf)
    return torch.where(rows.is_greedy, likeliest, _drawn(scores.softmax(-1), uniforms))


def _drawn(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at `uniforms`.

    It sums in the order of the vocabulary, not of the sorted scores: a row's token must not depend on whether another row of
    the batch has a filter.
    """
    cumulative = weights.cumsum(-1)
    # The last value is the total with its rounding errors. A target below it always finds a token with a probability.
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1).squeeze(1)


def _lowest_kept(scores: Tensor, rows: SamplingRows) -> Tensor:
    """The smallest score that top-k, top-p and min-p keep, applied one after the other: [rows, 1]."""
    ordered = scores.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, (rows.top_k - 1).clamp(max=scores.shape[1] - 1))
    probabilities = ordered.masked_fill(ordered < kth, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    num_kept = ((before < rows.top_p) & (probabilities > 0)).sum(-1, keepdim=True).clamp(min=1)
    return torch.maximum(ordered.gather(1, num_kept - 1), ordered[:, :1] + rows.min_p.log())


# --- randomness ------------------------------------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit numbers whose results look random (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seed_of(seed: int, sample_index: int) -> int:
    """The seed of one sample of a request."""
    mixed = _mix(np.array([seed], np.uint64) + _GOLDEN * np.array([sample_index], np.uint64))
    return int(mixed[0])


def uniforms_for(seeds: npt.NDArray[np.uint64], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """A number in [0, 1) for each pair of a seed and how many tokens were sampled with it before."""
    bits = _mix(_mix(seeds) + _GOLDEN * (steps.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


class _Watched(NamedTuple):
    """Samples of a sequence whose scores depend on its tokens: by a grammar, or by logits processors."""

    generation: Generation
    sample: int
    first: int  # row
    repeat: int  # rows from there on: samples that begin together


class _Rows(NamedTuple):
    """What stays the same from step to step while the batch does."""

    params: SamplingRows
    source: Int64Array | None  # row of the logits that each sample is drawn from; None: one each, in order
    seeds: npt.NDArray[np.uint64]
    prompt_lengths: Int64Array
    lanes: Tensor
    masked: tuple[_Watched, ...]  # by a grammar
    processed: tuple[_Watched, ...]  # by logits processors


def _processed(processed: Sequence[_Watched], scores: Tensor) -> Tensor:
    """The scores as the logits processors of some samples change them. If one fails, its request ends with the error."""
    scores = scores.clone()
    for each in processed:
        generation = each.generation
        if generation.has_ended(each.sample):
            continue
        answer = generation.samples[each.sample].token_ids if each.sample in generation.samples else []
        tokens = np.append(generation.prompt.astype(np.int64), np.array(answer, np.int64))
        ids = upload(tokens, scores.device).unsqueeze(0)
        for row in range(each.first, each.first + each.repeat):
            try:
                given = scores[row : row + 1].clone()
                for processor in generation.params.logits_processors:
                    given = processor(ids, given)
                scores[row : row + 1] = given
            except Exception as error:
                generation.failure = StepError(
                    f"a logits processor of this request failed: {type(error).__name__}: {error}"
                )
                generation.failure.__cause__ = error
    return scores


class StepSampler(StepPart):
    """Turns the logits of a plan into one token per sample, on the device."""

    def __init__(
        self,
        vocabulary: int,
        max_sequences: int,
        device: torch.device,
        generations: Mapping[Hashable, Generation],
        tokens_of: Callable[[ScheduledSequence], npt.NDArray[np.int32]],
    ) -> None:
        self._tokens_of = tokens_of  # `Scheduler.token_ids`
        self._generations = generations  # by request id
        self._vocabulary = vocabulary
        self._max_sequences = max_sequences
        self._device = device
        self._counts: TokenCounts | None = None  # made when the first request with penalties comes
        self._cached: tuple[tuple[object, ...], _Rows] | None = None  # and what they depend on

    def entered(self, sequence: ScheduledSequence) -> None:
        """Counts the tokens that a sequence with penalties has."""
        generation = self._generations.get(sequence.request.id)
        if generation is None or not generation.params.has_penalties or sequence.lane < 0:
            return
        if self._counts is None:
            self._counts = TokenCounts(self._max_sequences, self._vocabulary, self._device)
        length, tokens = len(generation.prompt), self._tokens_of(sequence)
        self._counts.start(sequence.lane, tokens[:length], tokens[length:])

    def sample(self, plan: BatchPlan, logits: Tensor, catch_up: Callable[[], None]) -> Sampled:
        """One token per sample of the plan, and one behind each draft.

        A grammar and logits processors need all earlier tokens on the host. So `catch_up` is called first if there are any,
        while the device still computes the logits.
        """
        rows = self._rows_of(plan)
        if rows.masked or rows.processed:
            catch_up()
        mask = self._mask(rows.masked) if rows.masked else None
        process = partial(_processed, rows.processed) if rows.processed else None
        if rows.source is not None:
            logits = logits.index_select(0, upload(rows.source, self._device))
        uniforms = None
        if not rows.params.greedy:
            uniforms = upload(uniforms_for(rows.seeds, self._steps(plan, rows)), self._device)
        sampled = sample(logits, rows.params, uniforms, self._counts, rows.lanes, mask, process)
        if self._counts is not None and rows.params.penalised:
            self._counts.add(rows.lanes, sampled.tokens)
        return sampled

    def _rows_of(self, plan: BatchPlan) -> _Rows:
        """The rows of the sequences that sample. While these stay the same, so do their rows."""
        chosen = plan.sampling_rows
        sequences = plan.sequences
        if len(chosen) < len(sequences):
            sequences = tuple(sequences[row] for row in chosen.tolist())
        lanes, num_samples, drafts = plan.lanes[chosen], plan.num_samples[chosen], plan.num_drafts[chosen]
        key = sequences, lanes.tobytes(), num_samples.tobytes(), drafts.tobytes()
        if self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        repeats = num_samples + drafts  # a row has drafts or several samples, never both
        source = None
        if int(repeats.max(initial=1)) > 1:
            firsts = np.cumsum(drafts + 1) - (drafts + 1)
            source = np.repeat(firsts, repeats) + np.where(np.repeat(drafts, repeats) > 0, within(repeats), 0)
        params: list[SamplingParams] = []
        seeds, lengths, masked, processed = [], [], [], []
        for sequence, repeat, draft in zip(sequences, repeats.tolist(), drafts.tolist(), strict=True):
            generation, index = self._generations[sequence.request.id], sequence.index
            watched = _Watched(generation, index, len(params), repeat)
            if generation.params.grammar is not None:
                masked.append(watched)
            if generation.params.logits_processors:
                processed.append(watched)
            params += [generation.params] * repeat
            lengths += [len(generation.prompt)] * repeat
            seeds += [seed_of(generation.seed, index + (0 if draft else number)) for number in range(repeat)]
        rows = _Rows(
            SamplingRows(params, self._device),
            source,
            np.array(seeds, np.uint64),
            np.array(lengths, np.int64),
            upload(np.repeat(lanes, repeats), self._device),
            tuple(masked),
            tuple(processed),
        )
        self._cached = key, rows
        return rows

    def _mask(self, masked: tuple[_Watched, ...]) -> TokenMask:
        """What the grammars of these samples allow now."""
        words = np.empty((len(masked), num_words(self._vocabulary)), np.int32)
        for at, each in enumerate(masked):
            each.generation.fill_mask(each.sample, words[at])
        repeats = np.array([each.repeat for each in masked])
        rows = np.concatenate([np.arange(each.first, each.first + each.repeat) for each in masked])
        return TokenMask(upload(rows, self._device), upload(words.repeat(repeats, axis=0), self._device))

    def _steps(self, plan: BatchPlan, rows: _Rows) -> Int64Array:
        """How many tokens each sample's sequence has sampled before."""
        positions = plan.positions[plan.logits_indices]
        if rows.source is not None:
            positions = positions[rows.source]
        return positions + 1 - rows.prompt_lengths
