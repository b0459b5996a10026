"""A real browser without a screen, driven over WebDriver: plain HTTP and JSON, so that no client library is needed."""

import base64
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_START_TIMEOUT_S = 900
_SHIFT = "\ue008"

#: Besides what makes it run as root in a container: nothing that reaches for the network on its own.
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)


def browser_paths() -> tuple[str, str]:
    """Return the paths of Chromium and of its driver, or skip the test, saying what to install."""
    browser = os.environ.get("KINLOG_CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = os.environ.get("KINLOG_CHROMEDRIVER") or shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = (
            "needs Chromium and its driver: apt-get install chromium chromium-driver, "
            "or set KINLOG_CHROMIUM and KINLOG_CHROMEDRIVER"
        )
        if os.environ.get("KINLOG_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    return browser, driver


class Browser:
    """One window."""

    def __init__(self, base: str, session: str) -> None:
        self._base = f"{base}/session/{session}"

    def open(self, url: str) -> None:
        """Open a page, with nothing left of what an earlier one said or asked for."""
        self._send("POST", "/url", {"url": "about:blank"})
        self.complaints()
        self.requests()
        self._send("POST", "/url", {"url": url})

    def run(self, code: str, *arguments: object) -> Any:
        """Run JavaScript: the body of a function whose ``arguments`` are given. A promise is waited for."""
        return self._send("POST", "/execute/sync", {"script": code, "args": list(arguments)})

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, looked at before each frame."""
        code = """
            const [holds, done] = [new Function(`return ${arguments[0]}`), arguments[1]];
            (function look() { if (holds()) done(true); else requestAnimationFrame(look); })();
        """
        self._send("POST", "/execute/async", {"script": code, "args": [condition]})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def visible(self, selector: str) -> bool:
        return bool(self.run("return !document.querySelector(arguments[0]).hidden", selector))

    def click(self, selector: str) -> None:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[_ELEMENT]}/click", {})

    def type(self, selector: str, words: str) -> None:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[_ELEMENT]}/value", {"text": words})

    def press(self, keys: str) -> None:
        """Press and release keys, one after the other."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keys", "actions": strokes})

    def move_to(self, x: float, y: float) -> None:
        self._act(_pointer(_moved(x, y)))

    def drag(self, start: tuple[float, float], end: tuple[float, float], *, shift: bool = False) -> None:
        pointer = _pointer(
            _moved(*start),
            {"type": "pointerDown", "button": 0},
            _moved(*end),
            {"type": "pointerUp", "button": 0},
        )
        if not shift:
            return self._act(pointer)
        held = [{"type": "keyDown", "value": _SHIFT}, *({"type": "pause"} for _ in range(3))]
        pointer["actions"].insert(0, {"type": "pause"})
        self._act(pointer, {"type": "key", "id": "keys", "actions": held})
        return self._send("DELETE", "/actions")

    def wheel(self, x: float, y: float, delta_y: int) -> None:
        turn = {"type": "scroll", "x": int(x), "y": int(y), "deltaX": 0, "deltaY": delta_y}
        self._act({"type": "wheel", "id": "wheel", "actions": [turn]})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def devtools(self, command: str, **parameters: object) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def complaints(self) -> list[str]:
        """Return what the console was told since the last call."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Return the URLs that were asked for since the last call."""
        entries = self._send("POST", "/se/log", {"type": "performance"})
        told = [json.loads(entry["message"])["message"] for entry in entries]
        return [t["params"]["request"]["url"] for t in told if t["method"] == "Network.requestWillBeSent"]

    def _act(self, *sources: dict[str, Any]) -> None:
        self._send("POST", "/actions", {"actions": list(sources)})

    def _send(self, method: str, path: str, body: object = None) -> Any:
        return _call(method, self._base + path, body)


def _moved(x: float, y: float) -> dict[str, Any]:
    return {"type": "pointerMove", "x": int(x), "y": int(y), "duration": 0}


def _pointer(*actions: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "pointer",
        "id": "mouse",
        "parameters": {"pointerType": "mouse"},
        "actions": list(actions),
    }


def _call(method: str, url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, method=method, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_START_TIMEOUT_S) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {json.load(error)['value']['message']}") from error


@contextmanager
def started_browser(profile: Path, *, width: int = 1440, height: int = 900) -> Iterator[Browser]:
    """Start a browser with a new profile in an empty directory, and end it."""
    browser, driver = browser_paths()
    options = {
        "binary": browser,
        "args": [*_ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"],
    }
    capabilities = {
        "browserName": "chrome",
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        "timeouts": {"script": 600_000, "pageLoad": 600_000},
    }
    # The driver chooses a free port, and says which.
    with subprocess.Popen(
        [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            base = f"http://127.0.0.1:{_port(process)}"
            session = _call("POST", f"{base}/session", {"capabilities": {"alwaysMatch": capabilities}})
            try:
                yield Browser(base, session["sessionId"])
            finally:
                _call("DELETE", f"{base}/session/{session['sessionId']}")
        finally:
            process.terminate()


def _port(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    for line in process.stdout:
        words = line.rstrip(".\n").split()
        if "successfully" in words:
            return int(words[-1])
    raise AssertionError("chromedriver ended without saying which port it listens on")
