"""A real browser: Chromium without a window, driven over the DevTools protocol through two pipes.

commands ──► fd 3 of Chromium      JSON, each message ends with a zero byte
answers and events ◄── fd 4
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager

TIMEOUT_S = 60
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root has no user namespaces in a container; only our own page is opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--password-store=basic",
)


class Browser:
    """One tab. Everything it asked for and complained about is kept."""

    def __init__(self, folder):
        program = shutil.which("chromium")
        assert program, "tests/install-servers.sh installs Chromium"
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        command = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "chromium", program, *OPTIONS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(reads, writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._rest = b""
        self._ids = itertools.count(1)
        self.requests: list[str] = []
        """The URLs of all requests."""
        self.complaints: list[str] = []
        """Errors of the console: exceptions, violations of the content policy, failed requests."""
        self._session = None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._read(until)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _read(self, until):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser ended"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event):
        what, told = event.get("method"), event.get("params", {})
        if what == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif what == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif what == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif what == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"]))

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition, seconds=30):
        """Wait, in the page, until an expression is true."""
        deadline = time.monotonic() + seconds
        looked = f"(() => {{ try {{ return Boolean({condition}) }} catch {{ return false }} }})()"
        pause = "new Promise((done) => setTimeout(done, 50))"
        while not self.run(looked):
            assert time.monotonic() < deadline, f"never true: {condition}\n{self.complaints}"
            self.run(pause)

    def write(self, selector, text):
        self.run(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}")

    def click(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, path, before, *, width, height, dark=False):
        """What a window of this size shows, as a PNG, after the script `before`."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.run(before)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        os.close(self._out)  # Chromium ends when nobody talks to it any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)


@contextmanager
def browsing():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(folder)
        try:
            yield browser
        finally:
            browser.close()
