"""Following what a manager is asked for: `KVCacheManager.observe` takes an observer, the recorder is one."""

from __future__ import annotations

from typing import Any, Protocol


class Observer(Protocol):
    """Is told of every operation that succeeded; one that raised has changed nothing.

    Both methods are called inside the manager's lock, in the order of the operations and in the thread of the caller, so
    they must be quick and must not call the manager. What `done` raises is logged and goes no further. A manager that
    nobody observes does not call anything.
    """

    def done(self, verb: str, now: float, result: Any, arguments: tuple[Any, ...]) -> None:
        """The manager's method `verb` returned `result` at `now`, by its clock.

        `arguments` stand in the order of the method's signature, defaults included, with token lists and counts as the
        manager converted them. The multimodal items of a commit are those that begin among its tokens, also where they came
        with the prompt. `allocate` gives its keyword arguments as one dictionary behind the tokens. `extend`
        and `prefetch` are told as `extend_batch` and `onboard`; `allocate_batch` as one `allocate` for each request;
        `commit` as `commit_batch`, or as `commit` without tokens.
        """

    def choose_source(self, run: int) -> int:
        """The tokens of a partly matching block come from the run with this number; returns the number to take instead.

        Only a run that stands beside it in the tree can take its place. An observer that only looks returns `run`.
        """
