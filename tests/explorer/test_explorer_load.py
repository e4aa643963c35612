"""The server under many clients and slow ones, and what other users of the machine can see of it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `leafward explore`, which opens a browser that writes down how it was started and what it read."""
    folder = tmp_path_factory.mktemp("load")
    (folder / "tax.csv").write_text("child,parent\nroot,\na,root\nb,root\n")
    browser = folder / "browser"
    browser.write_text('#!/bin/sh\necho "$@" > "$0.words"\ncat "${1#file://}" > "$0.read"\n')
    browser.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "leafward.cli", "explore", folder / "tax.csv", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "BROWSER": f"{browser} %s"},
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"] + f"#{browser}"
    finally:
        process.kill()
        process.wait()


def where(address: str) -> tuple[str, int, str]:
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port, parts.path


def test_two_hundred_clients_with_five_requests_each_are_all_answered(address: str) -> None:
    """786 of these 1,000 were answered with 503."""
    host, port, home = where(address)
    paths = ["", "scene.json", "labels.json", "page/app.js", "neighbours.json?view=0&id=1"]

    async def client() -> list[bytes]:
        found = []
        reader, writer = await asyncio.open_connection(host, port)
        for path in paths:
            writer.write(f"GET {home}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            found.append(head.split()[1])
        writer.close()
        return found

    async def everybody() -> list[list[bytes]]:
        return await asyncio.gather(*(client() for _ in range(200)))

    statuses = Counter(status for each in asyncio.run(everybody()) for status in each)
    assert sum(statuses.values()) == 1000
    assert set(statuses) <= {b"200", b"400"}  # 400: there may be no view of that name
    assert statuses[b"200"] >= 800


SLOW = {
    "says nothing": b"",
    "half a line": b"GET / HT",
    "headers without an end": b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ",
    "a body that does not come": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nab",
}


def test_slow_sockets_are_closed_within_five_seconds(address: str) -> None:
    host, port, _ = where(address)
    with ExitStack() as held:
        started = time.monotonic()
        sockets = {}
        for name, words in SLOW.items():
            for _ in range(50):
                each = held.enter_context(socket.create_connection((host, port)))
                each.sendall(words)
                sockets[each] = name
        with urllib.request.urlopen(address.partition("#")[0] + "scene.json", timeout=30) as answer:
            assert json.load(answer)["count"] == 3  # while two hundred are held open
        open_ones = dict(sockets)
        while open_ones and time.monotonic() - started < 60:
            for each in list(open_ones):
                each.settimeout(0.01)
                try:
                    if open_ones[each] != "says nothing" and open_ones[each] != "a body that does not come":
                        each.send(b"x")  # a byte now and then does not help
                    if not each.recv(4096):
                        del open_ones[each]
                except TimeoutError:
                    pass
                except OSError:
                    del open_ones[each]
        assert not open_ones, Counter(open_ones.values())


def test_a_slow_socket_has_as_long_as_is_said() -> None:
    """The bound itself, on a clock of its own: no server, no waiting."""
    from leafward.explorer.sockets import PATIENCE

    assert PATIENCE < 5.0


def test_the_token_is_not_among_the_words_of_the_browser(address: str) -> None:
    browser = Path(address.partition("#")[2])
    told = browser.with_suffix(".read")
    for _ in range(200):
        if told.exists() and told.stat().st_size:
            break
        time.sleep(0.05)
    token = where(address)[2].strip("/")
    words = browser.with_suffix(".words").read_text()
    assert token not in words
    assert f"/{token}/" in told.read_text()  # but in the file, which nobody else can read
    page = Path(words.strip().removeprefix("file://"))
    assert page.parent.stat().st_mode & 0o077 == 0


def test_a_link_may_open_the_page_and_nothing_else(address: str) -> None:
    plain = address.partition("#")[0]
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    cases = [
        ("", link, 200),
        ("scene.json", link, 403),
        ("", {**link, "Sec-Fetch-Dest": "iframe"}, 403),
        ("", {**link, "Sec-Fetch-Mode": "no-cors"}, 403),
        ("", {**link, "Origin": "http://evil.example"}, 403),
    ]
    for path, headers, status in cases:
        try:
            with urllib.request.urlopen(urllib.request.Request(plain + path, headers=headers), timeout=30) as answer:
                found = answer.status
        except urllib.error.HTTPError as error:
            found = error.code
        assert found == status, (path, headers)
