"""A headless Chromium, driven over its debugging pipe: pages opened, keys pressed, JavaScript asked, pictures taken."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The browser of this machine: `KVPOOL_CHROMIUM`, or what is on the path."""
    return os.environ.get("KVPOOL_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class Chromium:
    """One browser process with a profile of its own. Use it in a `with` statement."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="kvpool-chromium-", ignore_cleanup_errors=True)
        read_here, write_there = map(_high, os.pipe())
        read_there, write_here = map(_high, os.pipe())

        def become() -> None:
            os.dup2(read_there, 3)
            os.dup2(write_there, 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--mute-audio",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-extensions",
                "--disable-component-update",
                "--remote-debugging-pipe",
                f"--user-data-dir={self._profile.name}",
                "--disable-background-timer-throttling",
                "--disable-backgrounding-occluded-windows",
                "--disable-renderer-backgrounding",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=become,
            pass_fds=(3, 4),
        )
        os.close(read_there)
        os.close(write_there)
        self._in, self._out, self._rest = read_here, write_here, b""
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def runs(self) -> bool:
        """Whether the browser starts at all: it may lack libraries, or be refused by the machine."""
        try:
            self.ask("Browser.getVersion")
        except (AssertionError, OSError):
            return False
        return True

    def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One call of the debugging protocol."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._next(until)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser said nothing for {SECONDS} s"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser ended"
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(first)
        return answer

    def open(self, url: str, width: int = 1440, height: int = 900, **options: Any) -> Page:
        """A new page of that size, in CSS pixels."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.ask("Page.enable")
        page.ask("Runtime.enable")
        page.ask("Log.enable")
        page.resize(width, height, **options)
        page.ask("Page.bringToFront")
        page.ask("Page.navigate", url=url)
        return page


class Page:
    """One page."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One call of the debugging protocol, about this page."""
        return self._browser.ask(method, self._session, **params)

    def resize(
        self, width: int, height: int, *, scale: float = 1.0, mobile: bool = False, scheme: str = "dark"
    ) -> None:
        """Another size, another device, another colour scheme."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def value(self, expression: str) -> Any:
        """What JavaScript says; a promise is waited for."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Waits, in the page, until JavaScript says something true, and returns it."""
        waiting = (
            "new Promise((done, fail) => { const began = Date.now(); const look = () => { let value; "
            f"try {{ value = ({expression}); }} catch (problem) {{ value = null; }} "
            "if (value) done(value); else if (Date.now() - began > 40000) fail(new Error('never true')); "
            "else setTimeout(look, 25); }; look(); })"
        )
        return self.value(waiting)

    def press(self, key: str, text: str = "") -> None:
        """A key goes down and up."""
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32}.get(
            key, 0
        )
        typed = {"text": "\r"} if key == "Enter" else {"text": text} if text else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **typed)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def click(self, x: float, y: float) -> None:
        """A click at a place of the page that is in sight."""
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def problems(self) -> list[str]:
        """What the page complained of so far: exceptions, and errors on its console."""
        self.value("1")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"].get("exception", event["params"])))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(str(event["params"]["entry"]["text"]) + " " + str(event["params"]["entry"].get("url", "")))
        return found

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is in sight, or of the whole page."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


def _high(descriptor: int) -> int:
    """The same pipe under a number that no child needs."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(descriptor)
    return moved
