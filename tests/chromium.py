"""A real browser for the tests of pages: what it drew, what it complained of, what it asked for."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
browser = pytest.mark.skipif(not CHROMIUM, reason="no browser: set CHROMIUM or install chromium")


def browse(page: Path, tmp: Path) -> tuple[str, list[str], set[str]]:
    """The page's DOM after its scripts ran, its console lines, and every URL it asked for."""
    for attempt in range(3):
        try:
            return browse_once(page, tmp / f"browser-{attempt}")
        except (subprocess.SubprocessError, json.JSONDecodeError) as problem:
            failed = problem  # the browser itself crashed or tore its log: nothing about the page
    raise failed


def browse_once(page: Path, tmp: Path) -> tuple[str, list[str], set[str]]:
    tmp.mkdir()
    net = tmp / "net.json"
    # No name resolves: neither a page that asks nor the browser's own habits leave this machine.
    quiet = "background-networking component-update sync default-apps extensions quic gpu"
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--no-first-run",
            "--no-proxy-server",
            *(f"--disable-{what}" for what in quiet.split()),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--v=0",
            "--window-size=1200,6000",
            "--virtual-time-budget=10000",
            f"--user-data-dir={tmp / 'profile'}",
            f"--log-net-log={net}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    requests = [event.get("params", {}) for event in json.loads(net.read_text())["events"]]
    # The browser's own requests (its clock, its updates) have no origin; a page's have one.
    own = "not an origin"
    asked = {r["url"] for r in requests if "url" in r and r.get("initiator", own) != own}
    return done.stdout, console, asked


def drawn(dom: str) -> int:
    return len(re.findall(r'class="plot js-plotly-plot', dom))
