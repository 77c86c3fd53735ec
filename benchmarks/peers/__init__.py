"""Peers of kvpool. Each runs in an interpreter of its own, so that nothing of it is ever installed beside kvpool.

`PeerProcess` is our end: it starts a driver script with the peer's interpreter and talks to it in JSON lines, one
repeat per request, so that its repeats alternate with ours. `serve` is the driver's end.

    -> {"op": "setup", "case": "decode", "params": {"num_sequences": 64}}     <- {"ok": true}
    -> {"op": "repeat"}                                                       <- {"samples": [0.61, 0.6]}
    -> {"op": "call", "name": "ask", "params": {...}}                         <- {"answer": ...}
                                                       (where it went wrong)  <- {"error": "..."}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import PeerAbsentError, Runner


class PeerProcess:
    """A peer behind a driver script. `python` is an interpreter that has the peer, None where there is none.

    `options` are those of `subprocess.Popen`, for instance its environment.
    """

    def __init__(
        self, name: str, driver: Path, python: str | None, remedy: str, arguments: Sequence[str] = (), **options: Any
    ) -> None:
        self.name = name
        self._driver = driver
        self._arguments = arguments
        self._options = options
        self._python = python
        self._remedy = remedy
        self._process: subprocess.Popen[str] | None = None
        self._reason = "not started"

    def start(self) -> str:
        """Starts the driver and returns the peer's version."""
        self.begin()
        return self.wait()

    def begin(self, **options: Any) -> None:
        """Starts the driver, with further options; others can be started before it is waited for."""
        if not self._python:
            self._reason = self._remedy
            raise PeerAbsentError(self._reason)
        command = [self._python, str(self._driver), *self._arguments]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **self._options, **options
            )
        except OSError as error:
            self._reason = f"{self._python} does not run: {error}"
            raise PeerAbsentError(self._reason) from error

    def wait(self) -> str:
        """Until the driver that was started is ready; returns the peer's version."""
        return str(self._receive()["version"])

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        """Builds the state of a named case in the driver, dropping the one before."""
        self._ask({"op": "setup", "case": case, "params": dict(params)})

    def repeat(self) -> Sequence[float]:
        """Runs one repeat in the driver."""
        return [float(sample) for sample in self._ask({"op": "repeat"})["samples"]]

    @property
    def pid(self) -> int | None:
        """The driver's process; None where none runs."""
        return self._process.pid if self._process is not None else None

    def call(self, name: str, **params: Any) -> Any:
        """Has the driver do something and returns its answer."""
        return self._ask({"op": "call", "name": name, "params": params})["answer"]

    def close(self) -> None:
        """Ends the driver by closing its input."""
        if (process := self._process) is None:
            return
        self._process = None
        self._reason = "closed"
        try:
            process.communicate()
        except BrokenPipeError:
            process.wait()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            raise PeerAbsentError(self._reason)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the driver ended: its last words, or their absence, are read below
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self.close()
            self._reason = f"its driver ended with status {status}"
            raise PeerAbsentError(self._reason)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerAbsentError(str(answer["error"]))
        return answer


def serve(
    version: Callable[[], str],
    cases: Mapping[str, Callable[..., Runner]],
    calls: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """The driver's loop: answers requests from stdin until it ends. Whatever the peer itself prints goes to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        runner: Runner | None = None

        def answer(message: Mapping[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
            nonlocal runner
            if request["op"] == "setup":
                runner = None  # the state of the case before is given back first
                runner = cases[request["case"]](**request["params"])
                return {"ok": True}
            if request["op"] == "call":
                return {"answer": (calls or {})[request["name"]](**request["params"])}
            if runner is None:
                raise ValueError("a repeat was asked for before a setup")
            return {"samples": list(runner())}

        answer(_guarded(lambda: {"version": version()}))
        for line in sys.stdin:
            answer(_guarded(partial(handle, json.loads(line))))


def _guarded(act: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return act()
    except Exception as error:  # the other end decides what to do; the trace is for people
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
