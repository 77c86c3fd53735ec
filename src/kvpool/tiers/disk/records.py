"""The index of one slab: a record of 64 bytes per slot, in the order of the slots, so that it never grows.

    key (32) | number of bytes (8) | last use (8) | check of key, number, slab and slot (8) | zeros (8)

A record of zeros is a free slot. The check finds damaged records; it leaves out the last use, which is written later and
may be old. A record is a hint: a value counts only when the header in its slot agrees (`tiers/envelope.py`).
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Records: TypeAlias = npt.NDArray[Any]
"""A structured array, one record per slot."""

RECORD = np.dtype([("key", "V32"), ("length", "<u8"), ("used", "<u8"), ("check", "<u8"), ("spare", "<u8")])
RECORD_BYTES = RECORD.itemsize

_FACTORS = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
    ],
    np.uint64,
)  # odd, so that a change of any one word changes the sum


def empty_records(num_slots: int) -> Records:
    """Records of free slots."""
    return np.zeros(num_slots, RECORD)


def is_held(records: Records) -> npt.NDArray[np.bool_]:
    """Which slots have a record that is not of zeros."""
    held: npt.NDArray[np.bool_] = records["check"] != 0
    return held


def made_record(slab_id: int, slot: int, key: bytes, length: int, used: int) -> Records:
    """The record of one slot, as an array of one."""
    row = empty_records(1)
    row[0] = (key, length, used, 0, 0)
    row["check"] = _checks(row, slab_id, slot)
    return row


def fill_record(records: Records, slab_id: int, slot: int, key: bytes, length: int, used: int) -> None:
    """Writes the record of one slot, at once."""
    records[slot] = made_record(slab_id, slot, key, length, used)[0]


def microseconds() -> int:
    """The time of a use, as records hold it."""
    return time.time_ns() // 1000


def take_damaged(records: Records, slab_id: int, max_length: int) -> int:
    """Empties records that nobody wrote like this, and takes back uses in the future; returns how many were emptied."""
    records["used"] = np.minimum(records["used"], np.uint64(microseconds()))
    words = records.view(np.uint64).reshape(len(records), -1)
    wrong = (records["check"] != _checks(records, slab_id, 0)) | (records["length"] > max_length)
    wrong &= words.any(axis=1)
    records[wrong] = np.zeros((), RECORD)
    return int(wrong.sum())


def _checks(records: Records, slab_id: int, first_slot: int) -> npt.NDArray[np.uint64]:
    """The check that belongs into each record; never 0."""
    words = records.view(np.uint64).reshape(len(records), -1)[:, :5]
    slots = np.arange(first_slot + 1, first_slot + 1 + len(records), dtype=np.uint64)
    sums = (words * _FACTORS[:5]).sum(axis=1, dtype=np.uint64) + slots * _FACTORS[5] + np.uint64(slab_id)
    checks: npt.NDArray[np.uint64] = (sums ^ (sums >> np.uint64(29))) | np.uint64(1)
    return checks
