"""Prompt lookup: the next tokens are guessed from an earlier place where the last few tokens stood before."""

from __future__ import annotations

import numpy as np

from kvpool.pools.arrays import Int32Array

NO_DRAFT: Int32Array = np.empty(0, np.int32)


def propose(tokens: Int32Array, num_draft: int, max_ngram: int = 3, min_ngram: int = 1) -> Int32Array:
    """Up to `num_draft` tokens that followed the latest earlier occurrence of the longest known ending of `tokens`.

    >>> propose(np.array([5, 6, 7, 8, 1, 5, 6], np.int32), num_draft=2).tolist()
    [7, 8]
    """
    total = len(tokens)
    for length in range(min(max_ngram, total - 1), min_ngram - 1, -1):
        ending = tokens[total - length :]
        # Candidates end before the last token, so that something follows each of them.
        windows = np.lib.stride_tricks.sliding_window_view(tokens[: total - 1], length)
        places = np.flatnonzero((windows == ending).all(axis=1))
        if len(places):
            start = int(places[-1]) + length
            return tokens[start : start + num_draft].copy()
    return NO_DRAFT
