"""Draws docs/images/pool.svg: chats that share a system prompt, and what the real manager does with its blocks meanwhile.

`python tools/pool_picture.py [FILE]` (or `make pictures`). Only the traffic is made up, from a seed: every frame is read
from `KVCacheManager.handles`, `.cached_runs()` and `.stats()`, so the same code draws the same picture.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np

from kvpool import AllocStatus, KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, Tier

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "pool.svg"
BLOCK_SIZE = 16
COLUMNS, GPU_ROWS, HOST_ROWS = 32, 12, 6
NUM_FRAMES, FRAME_SECONDS = 80, 0.35
TOKENS_PER_FRAME = 32  # that every running request decodes between two frames

FREE, OWN, SHARED, CACHED, HOST = range(5)
COLOURS = ("#8b949e38", "#2f81f7", "#e5489b", "#2da44e", "#d29922")
LABELS = ("free", "in use by one request", "in use by several", "cached, nobody reads it", "cached on the host")

# --- traffic ----------------------------------------------------------------------------------------------------------


@dataclass
class Chat:
    """A person who sends everything said so far and something new, waits for the answer, and thinks."""

    name: int
    history: list[int]
    turns_left: int
    thinking: int = 0  # frames until the next question
    handle: KVCacheHandle | None = None
    answer_left: int = 0


class Traffic:
    """Chats of a few turns behind one of two system prompts, on a pool that cannot keep all of them."""

    def __init__(self, seed: int = 3) -> None:
        self.random = random.Random(seed)
        self.time = 0.0
        layers = [LayerSpec(kv_heads=8, head_dim=128)] * 32
        config = KVCacheConfig(
            layers, block_size=BLOCK_SIZE, gpu_blocks=COLUMNS * GPU_ROWS, host_blocks=COLUMNS * HOST_ROWS
        )
        self.manager = KVCacheManager(config, clock=lambda: self.time)
        self.systems = [self._words(40 * BLOCK_SIZE), self._words(24 * BLOCK_SIZE)]
        self.chats: list[Chat] = []
        self.num_chats = 0

    def frame(self) -> None:
        """Everything that happens between two pictures."""
        self.time += FRAME_SECONDS
        while len(self.chats) < 12 and self.num_chats <= self.time / 0.6:
            system = self.systems[self.random.random() < 0.4]
            self.chats.append(Chat(self.num_chats, list(system), self.random.randint(2, 5)))
            self.num_chats += 1
        for chat in self.chats:
            chat.thinking -= 1
            if chat.handle is None and chat.thinking < 0:
                self._ask(chat)
        for _ in range(TOKENS_PER_FRAME):
            self._decode()
        self.manager.check()

    def _ask(self, chat: Chat) -> None:
        prompt = chat.history + self._words(self.random.randint(40, 200))
        answer = self.random.randint(80, 320)
        running = [other.answer_left for other in self.chats if other.handle is not None]
        if (
            len(running) >= 6
            or self.manager.can_allocate(prompt, lookahead=answer + sum(running)).status != AllocStatus.OK
        ):
            return  # asks again with the next frame
        chat.handle = self.manager.allocate(chat.name, prompt)
        self.manager.take_copies()
        self.manager.commit(chat.handle)
        chat.answer_left = answer

    def _decode(self) -> None:
        running = [(chat, chat.handle) for chat in self.chats if chat.handle is not None]
        if running:
            batch = self.manager.batch([handle for _, handle in running])
            self.manager.extend_batch(batch)
            self.manager.take_copies()
            self.manager.commit_batch(batch, self._words(len(running)))
        for chat, handle in running:
            chat.answer_left -= 1
            if not chat.answer_left:
                self._finish(chat, handle)

    def _finish(self, chat: Chat, handle: KVCacheHandle) -> None:
        chat.history = handle.token_ids.tolist()
        self.manager.free(handle)
        chat.handle = None
        chat.turns_left -= 1
        chat.thinking = self.random.randint(2, 14)
        if not chat.turns_left:
            self.chats.remove(chat)

    def _words(self, number: int) -> list[int]:
        return [self.random.randrange(1, 50_000) for _ in range(number)]


# --- what is seen -----------------------------------------------------------------------------------------------------


@dataclass
class Frame:
    """The pool at one moment."""

    gpu: list[int]
    host: list[int]
    hit_rate: float
    num_requests: int
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [(self.gpu + self.host).count(state) for state in range(len(COLOURS))]
        self.counts[FREE] = self.gpu.count(FREE)


def look(manager: KVCacheManager) -> Frame:
    """Reads the state of every block from the manager's public questions."""
    gpu = np.full(manager.inspect.num_blocks(), FREE)
    host = np.full(manager.inspect.num_blocks(tier=Tier.HOST), FREE)
    for run in manager.inspect.runs():
        if run.tier == Tier.GPU:
            gpu[run.block_ids[0]] = CACHED
        else:
            host[run.block_ids[0]] = HOST
    readers = np.zeros(len(gpu), np.int64)
    for handle in manager.handles:
        readers[handle.block_ids()] += 1
    gpu[readers == 1], gpu[readers > 1] = OWN, SHARED
    stats = manager.stats()
    return Frame(gpu.tolist(), host.tolist(), stats.token_hit_rate, stats.requests)


# --- drawing ----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, PITCH, CELL = 880, 424, 16, 14
LEFT, GPU_TOP, HOST_TOP = 24, 66, 66 + GPU_ROWS * 16 + 40
PANEL = LEFT + COLUMNS * PITCH + 32
PANEL_WIDTH, CHART_TOP, CHART_HEIGHT = WIDTH - PANEL - 24, 276, 94

STYLE = f"""
svg {{ font: 13px ui-sans-serif, system-ui, sans-serif; --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --line: #d1d9e0 }}
@media (prefers-color-scheme: dark) {{
  svg {{ --paper: #0d1117; --ink: #e6edf3; --faint: #9198a1; --line: #3d444d }}
}}
.paper {{ fill: var(--paper); stroke: var(--line) }} text {{ fill: var(--ink) }} .faint {{ fill: var(--faint) }}
.title {{ font-size: 15px; font-weight: 600 }} .big {{ font-size: 34px; font-weight: 600 }} .count {{ text-anchor: end }}
.axis {{ stroke: var(--line) }} .rate {{ fill: none; stroke: var(--ink); stroke-width: 2 }} .now {{ stroke: var(--faint) }}
.cells path {{ stroke-width: {CELL}; stroke-dasharray: {CELL} {PITCH - CELL}; fill: none }}
@keyframes show {{ 0% {{ visibility: visible }} {100 / NUM_FRAMES:.4f}%, 100% {{ visibility: hidden }} }}
.frame {{ visibility: hidden; animation: show {NUM_FRAMES * FRAME_SECONDS:g}s step-end infinite }}
.still {{ visibility: visible }}
@media (prefers-reduced-motion: reduce) {{ .frame {{ animation: none }} }}
"""


def cells(states: list[int], top: int) -> dict[int, str]:
    """One dashed path per state: neighbours in a row are one stroke."""
    paths: dict[int, str] = {}
    for row in range(len(states) // COLUMNS):
        column = 0
        for state, same in groupby(states[row * COLUMNS : (row + 1) * COLUMNS]):
            number = len(list(same))
            if state != FREE:
                start = f"M{LEFT + column * PITCH} {top + row * PITCH + CELL // 2}h{number * PITCH - 1}"
                paths[state] = paths.get(state, "") + start
            column += number
    return paths


def stack(frames: list[Frame]) -> str:
    """What the GPU pool held in every frame, stacked, as areas behind the hit rate."""
    areas, base = [], [0] * len(frames)
    for state in (SHARED, OWN, CACHED):
        upper = [low + frame.gpu.count(state) for low, frame in zip(base, frames, strict=True)]
        outline = [(x_of(at), y_of(value / len(frames[0].gpu))) for at, value in enumerate(upper)]
        outline += [(x_of(at), y_of(base[at] / len(frames[0].gpu))) for at in reversed(range(len(frames)))]
        points = " ".join(f"{x:g},{y:g}" for x, y in outline)
        areas.append(f'<polygon points="{points}" fill="{COLOURS[state]}" fill-opacity="0.55"/>')
        base = upper
    return "".join(areas)


def x_of(frame: int) -> float:
    return round(PANEL + PANEL_WIDTH * frame / (NUM_FRAMES - 1), 1)


def y_of(fraction: float) -> float:
    return round(CHART_TOP + CHART_HEIGHT * (1 - fraction), 1)


def draw_frame(at: int, frame: Frame) -> str:
    """All that changes from one moment to the next."""
    shown = cells(frame.gpu, GPU_TOP)
    shown.update(cells(frame.host, HOST_TOP))
    paths = "".join(f'<path d="{path}" stroke="{COLOURS[state]}"/>' for state, path in sorted(shown.items()))
    counts = "".join(
        f'<text class="count" x="{WIDTH - 24}" y="{legend_y(state)}">{number}</text>'
        for state, number in enumerate(frame.counts)
    )
    still = " still" if at == NUM_FRAMES - 1 else ""  # shown where nothing may move
    delay = (at - NUM_FRAMES) * FRAME_SECONDS
    return (
        f'<g class="frame{still}" style="animation-delay:{delay:.2f}s"><g class="cells">{paths}</g>{counts}'
        f'<text class="big" x="{PANEL}" y="224">{frame.hit_rate:.0%}</text>'
        f'<text class="faint" x="{PANEL}" y="244">of the tokens of {frame.num_requests} prompts were cached</text>'
        f'<path class="now" d="M{x_of(at)} {CHART_TOP}v{CHART_HEIGHT}"/></g>\n'
    )


def legend_y(state: int) -> int:
    return GPU_TOP + 11 + state * 23


def draw(frames: list[Frame]) -> str:
    """The whole picture."""
    background = "".join(
        f'<path d="M{LEFT} {top + row * PITCH + CELL // 2}h{COLUMNS * PITCH - 1}" stroke="{COLOURS[FREE]}"/>'
        for top, rows in ((GPU_TOP, GPU_ROWS), (HOST_TOP, HOST_ROWS))
        for row in range(rows)
    )
    legend = "".join(
        f'<rect x="{PANEL}" y="{legend_y(state) - 11}" width="{CELL}" height="{CELL}" fill="{COLOURS[state]}"/>'
        f'<text x="{PANEL + 24}" y="{legend_y(state)}">{label}</text>'
        for state, label in enumerate(LABELS)
    )
    rate = " ".join(f"{x_of(at)},{y_of(frame.hit_rate)}" for at, frame in enumerate(frames))
    bottom = CHART_TOP + CHART_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="The blocks of a pool while chats come and go">\n<style>{STYLE}</style>\n'
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>\n'
        f'<text class="title" x="{LEFT}" y="32">{frames[-1].num_requests} prompts of chats behind two system prompts</text>'
        f'<text class="faint" x="{LEFT}" y="54">GPU: {COLUMNS * GPU_ROWS} blocks of {BLOCK_SIZE} tokens</text>'
        f'<text class="faint" x="{LEFT}" y="{HOST_TOP - 12}">host: {COLUMNS * HOST_ROWS} blocks; '
        f"what the GPU evicts waits here for its chat to go on</text>\n"
        f'<g class="cells">{background}</g>{legend}\n'
        f'<path class="axis" d="M{PANEL} {bottom}h{PANEL_WIDTH}M{PANEL} {CHART_TOP}h{PANEL_WIDTH}"/>{stack(frames)}'
        f'<polyline class="rate" points="{rate}"/>'
        f'<text class="faint" x="{PANEL}" y="{bottom + 18}">GPU pool over time; line: hit rate</text>\n'
        f"{''.join(draw_frame(at, frame) for at, frame in enumerate(frames))}</svg>\n"
    )


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    traffic, frames = Traffic(), []
    for _ in range(NUM_FRAMES):
        traffic.frame()
        frames.append(look(traffic.manager))
    target.write_text(draw(frames), encoding="utf-8")
    last = frames[-1]
    print(f"{target.name}: {last.num_requests} prompts, hit rate {last.hit_rate:.0%}, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
