"""The explorer: targets that cannot be shown, and requests that must not be answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fuzz_files import ARRAYS

pytest.importorskip("fastapi")

from leafward.explorer import Options, build_scene, read_source
from leafward.explorer.server import create_app

TOKEN, HOST = "a-token", "127.0.0.1:4321"
GOOD = [(b"host", HOST.encode())]
TREE = "child,parent\nanimal,\ndog,animal\ncat,animal\npoodle,dog\n"


@pytest.fixture(autouse=True)
def nothing_is_served(monkeypatch):
    """A target that is taken would be served until somebody ends it; here it is an error."""

    def served(*args: Any, **options: Any) -> None:
        raise AssertionError("it is served")

    monkeypatch.setattr("leafward.explorer.server.serve", served)


@pytest.mark.parametrize("case", [name for name in ARRAYS if name != "nothing"])
def test_files_that_hold_no_array(case, place, refuses):
    (place / case).write_bytes(ARRAYS[case][1])
    refuses(["explore", case, "--no-open"], case)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["gone.npy"], "gone.npy"),
        (["tree.xlsx"], "tree.xlsx"),
        (["empty"], "empty"),
        (["tree.csv", "--port", "-1"], "port"),
        (["tree.csv", "--port", "70000"], "port"),
        (["tree.csv", "--limit", "1"], "limit"),
        (["tree.csv", "--export", "page.txt"], "page.txt"),
        (["tree.csv", "--export", "tree.csv/page.html"], "tree.csv"),
        (["tree.csv", "--host", "0.0.0.0"], "--host"),
        (["tree.csv", "--host", "0.0.0.0", "--allow-remote"], "--host"),
        (["tree.csv", "--host", "example.org"], "--host"),
        (["tree.csv", "--beside", "gone.csv"], "gone.csv"),
        (["tree.csv", "--beside", "points.npy"], "points.npy"),
        (["points.npy", "--c", "-1"], "c must"),
        (["points.npy", "--c", "nan"], "c"),
        (["points.npy", "--radius", "0"], "radius"),
        (["points.npy", "--radius", "2", "--vectors", "points"], "radius"),
        (["points.npy", "--vectors", "spheres"], "spheres"),
        (["points.npy", "--array", "x"], "x"),
        (["points.npy", "--labels", "gone.txt"], "gone.txt"),
        (["points.npy", "--labels", "few.txt"], "few.txt"),
        (["points.npy", "--taxonomy", "gone.csv"], "gone.csv"),
        (["points.npy", "--taxonomy", "tree.csv"], "tree.csv"),
        (["points.npy", "--layout", "umap"], "umap"),
        (["points.npy", "--images", "gone"], "gone"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_targets_and_flags(words, named, place, refuses):
    (place / "tree.csv").write_text(TREE)
    (place / "tree.xlsx").write_bytes(b"PK")
    (place / "empty").mkdir()
    (place / "few.txt").write_text("a\n")
    np.save(place / "points.npy", np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32))
    refuses(["explore", *words, "--no-open"], named)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scene")
    (folder / "tree.csv").write_text(TREE)
    return create_app(build_scene(read_source(folder / "tree.csv", Options())), TOKEN, {HOST})


def ask(app: Any, path: str, method: str = "GET", headers: list[tuple[bytes, bytes]] = GOOD, query: bytes = b"") -> Any:
    """(status, headers, body) of one request, as the server would hand it over."""
    answers: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode("utf-8", "surrogateescape"), "query_string": query, "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 4321),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    body = b"".join(each.get("body", b"") for each in answers)
    return answers[0]["status"], dict(answers[0]["headers"]), body


HOME = f"/{TOKEN}/"
PATHS = [
    "", "/", "/a-token", "/A-TOKEN/", "/a-tokem/", "/a-token-more/", "//a-token/", "/%61-token/", "/\u0430-token/",
    f"{HOME}../../../etc/passwd", f"{HOME}..%2f..%2fetc%2fpasswd", f"{HOME}page/../../../../etc/passwd",
    f"{HOME}/etc/passwd", f"{HOME}page//etc/passwd", f"{HOME}page/..\\..\\secrets", f"{HOME}page/app.js\0.png",
    f"{HOME}page/", f"{HOME}page", f"{HOME}.git/config", f"{HOME}tree.csv", f"{HOME}docs", f"{HOME}openapi.json",
    f"{HOME}redoc", f"{HOME}scene.json/", f"{HOME}SCENE.JSON", f"{HOME}thumb/", f"{HOME}thumb/0", f"{HOME}thumb/-1",
    f"{HOME}thumb/999999999999", f"{HOME}thumb/../scene.json", f"{HOME}thumb/٣", f"{HOME}neighbours",
    HOME + "x" * 600, HOME + "\ufffd",
]  # fmt: skip
QUERIES = [
    b"", b"view=poincare", b"id=0", b"view=none&id=0", b"view=poincare&id=", b"view=poincare&id=-1",
    b"view=poincare&id=99", b"view=poincare&id=1.5", b"view=poincare&id=nan", b"view=poincare&id=" + b"9" * 40,
    b"view=poincare&id=0x1", b"view=poincare&id=%D9%A3", b"view[]=poincare&id[]=0", b"view=poincare&id=1%00",
    b"view=../../etc&id=0", b"\xff\xfe", b"view=" + b"p" * 600,
]  # fmt: skip
HEADERS = {
    "no-host": [],
    "foreign-host": [(b"host", b"evil.example:4321")],
    "other-port": [(b"host", b"127.0.0.1:80")],
    "no-port": [(b"host", b"127.0.0.1")],
    "host-twice": [*GOOD, (b"host", b"evil.example")],
    "host-latin": [(b"host", b"\xff")],
    "foreign-origin": [*GOOD, (b"origin", b"https://evil.example")],
    "null-origin": [*GOOD, (b"origin", b"null")],
    "https-origin": [*GOOD, (b"origin", b"https://127.0.0.1:4321")],
    "origin-twice": [*GOOD, (b"origin", b"http://" + HOST.encode()), (b"origin", b"null")],
    "cross-site": [*GOOD, (b"sec-fetch-site", b"cross-site")],
    "same-site": [*GOOD, (b"sec-fetch-site", b"same-site")],
}
METHODS = ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "get", "NONSENSE"]


def refused(answer: Any, counts: Callable[[], None]) -> None:
    """A client's error in JSON, with the headers of every answer and nothing of ours in it."""
    status, headers, body = answer
    assert 400 <= status < 500, answer
    assert "error" in json.loads(body)
    assert b"content-security-policy" in headers
    for secret in (b"Traceback", b"/work", b"site-packages", b"root:", TOKEN.encode()):
        assert secret not in body
    counts()


def test_the_good_request_is_answered(app):
    assert ask(app, HOME)[0] == 200
    assert ask(app, f"{HOME}neighbours.json", query=b"view=poincare&id=0")[0] == 200


def test_paths(app, counts):
    for path in PATHS:
        refused(ask(app, path), counts)


def test_queries(app, counts):
    for query in QUERIES:
        refused(ask(app, f"{HOME}neighbours.json", query=query), counts)


def test_headers(app, counts):
    for headers in HEADERS.values():
        refused(ask(app, HOME, headers=headers), counts)


def test_methods(app, counts):
    for method in METHODS:
        refused(ask(app, HOME, method=method), counts)
