"""Every endpoint, and every request that must be refused."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from leafward.errors import LeafwardError, UsageError
from leafward.explorer import Options, Scene, build_scene, read_source

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2", reason="starlette's test client needs it")

from starlette.testclient import TestClient

from leafward.explorer import server
from leafward.explorer.server import check_host, create_app, serve

TOKEN, HOST = "a-token_of-the-test", "127.0.0.1:4321"
HOME = f"/{TOKEN}/"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    np.save(folder / "embeddings.npy", np.random.default_rng(0).normal(size=(20, 4)).astype("f4"))
    (folder / "names.txt").write_text("\n".join(f"</script><b>{i}" for i in range(20)))
    (folder / "labels.txt").write_text("\n".join("ab"[i % 2] for i in range(20)))
    (folder / "tax.csv").write_text("child,parent\nroot,\na,root\nb,root\n")
    pictures = folder / "pictures"
    pictures.mkdir()
    pytest.importorskip("PIL.Image").new("RGB", (8, 8)).save(pictures / "a.png")
    return build_scene(read_source(folder, Options(taxonomy=str(folder / "tax.csv"))), images=pictures)


@pytest.fixture(scope="module")
def client(scene: Scene) -> Iterator[TestClient]:
    with TestClient(create_app(scene, TOKEN, {HOST, "localhost:4321"}), base_url=f"http://{HOST}") as client:
        yield client


# What is answered


def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get(HOME)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert b"./page/app.js" in page.content
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css")):
        answer = client.get(f"{HOME}page/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)


def test_every_part_of_the_scene(client: TestClient, scene: Scene) -> None:
    described = client.get(f"{HOME}scene.json").json()
    assert described == json.loads(json.dumps(scene.describe("server")))
    for name, content in scene.parts().items():
        answer = client.get(HOME + name)
        assert answer.status_code == 200
        assert answer.content == content
    assert client.get(f"{HOME}labels.json").json()[0] == "</script><b>0"


def test_neighbours(client: TestClient, scene: Scene) -> None:
    import torch

    for view in scene.views:
        answer = client.get(f"{HOME}neighbours.json", params={"view": view.key, "id": 3}).json()
        distances = view.space.manifold.dist(view.space.points[3], view.space.points)
        order = torch.argsort(distances, stable=True)
        assert set(answer["ids"]) == set(order[1 : scene.k + 1].tolist())
        assert answer["distances"] == sorted(answer["distances"])
        assert 3 not in answer["ids"]


def test_thumbnails(client: TestClient, scene: Scene) -> None:
    answer = client.get(f"{HOME}thumb/0")
    assert answer.headers["content-type"] == "image/jpeg"
    assert answer.content == scene.thumbnails[0]
    assert client.get(f"{HOME}thumb/1").status_code == 404  # class b has none


def test_the_static_page(client: TestClient) -> None:
    answer = client.get(f"{HOME}export.html")
    assert answer.headers["content-disposition"] == "attachment"
    assert b'data-name="scene.json"' in answer.content
    assert answer.content == client.get(f"{HOME}export.html").content


def test_every_answer_has_the_headers_that_keep_it_here(client: TestClient) -> None:
    for path in (HOME, f"{HOME}scene.json", f"{HOME}nothing", "/elsewhere", f"{HOME}neighbours.json"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


# What is refused

REFUSED = {
    "no token": ("GET", "/", {}, 404),
    "no token, a part": ("GET", "/scene.json", {}, 404),
    "wrong token": ("GET", "/b-token_of-the-test/scene.json", {}, 404),
    "start of the token": ("GET", f"/{TOKEN[:-1]}/scene.json", {}, 404),
    "token and more": ("GET", f"/{TOKEN}x/scene.json", {}, 404),
    "token without its slash": ("GET", f"/{TOKEN}", {}, 404),
    "token that is not ASCII": ("GET", "/%C3%A4-token_of-the-test/", {}, 404),
    "foreign host": ("GET", HOME, {"host": "evil.example:4321"}, 421),
    "host without the port": ("GET", HOME, {"host": "127.0.0.1"}, 421),
    "host with another port": ("GET", HOME, {"host": "127.0.0.1:80"}, 421),
    "foreign origin": ("GET", HOME, {"origin": "http://evil.example"}, 403),
    "origin of a file": ("GET", HOME, {"origin": "null"}, 403),
    "origin by https": ("GET", HOME, {"origin": f"https://{HOST}"}, 403),
    "origin that begins as ours": ("GET", HOME, {"origin": f"http://{HOST}.evil.example"}, 403),
    "request of another site": ("GET", HOME, {"sec-fetch-site": "cross-site"}, 403),
    "request of another port": ("GET", HOME, {"sec-fetch-site": "same-site"}, 403),
    "post": ("POST", f"{HOME}scene.json", {}, 405),
    "put": ("PUT", f"{HOME}scene.json", {}, 405),
    "delete": ("DELETE", f"{HOME}labels.json", {}, 405),
    "options": ("OPTIONS", HOME, {}, 405),
    "unknown method": ("BREW", HOME, {}, 405),
    "unknown part": ("GET", f"{HOME}scene.xml", {}, 404),
    "unknown file of the page": ("GET", f"{HOME}page/none.js", {}, 404),
    "unknown view file": ("GET", f"{HOME}view/klein.bin", {}, 404),
    "docs": ("GET", f"{HOME}docs", {}, 404),
    "openapi": ("GET", f"{HOME}openapi.json", {}, 404),
    "redoc": ("GET", f"{HOME}redoc", {}, 404),
    "long path": ("GET", f"{HOME}{'a' * 600}", {}, 414),
    "long query": ("GET", f"{HOME}neighbours.json?view=lorentz&id={'1' * 600}", {}, 414),
    "unknown view": ("GET", f"{HOME}neighbours.json?view=klein&id=1", {}, 400),
    "no view": ("GET", f"{HOME}neighbours.json?id=1", {}, 400),
    "no id": ("GET", f"{HOME}neighbours.json?view=lorentz", {}, 400),
    "negative id": ("GET", f"{HOME}neighbours.json?view=lorentz&id=-1", {}, 400),
    "id too large": ("GET", f"{HOME}neighbours.json?view=lorentz&id=23", {}, 400),
    "huge id": ("GET", f"{HOME}neighbours.json?view=lorentz&id={'9' * 400}", {}, 400),
    "id that is no number": ("GET", f"{HOME}neighbours.json?view=lorentz&id=1e1", {}, 400),
    "id in other digits": ("GET", f"{HOME}neighbours.json?view=lorentz&id=%D9%A3", {}, 400),
    "thumbnail of nobody": ("GET", f"{HOME}thumb/99999999999999999999", {}, 404),
    "thumbnail by name": ("GET", f"{HOME}thumb/a", {}, 404),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(client: TestClient, case: str) -> None:
    method, path, headers, status = REFUSED[case]
    answer = client.request(method, path, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "way",
    [
        "../../../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/passwd",
        "page/../../../pyproject.toml",
        "page/..%5c..%5cserver.py",
        "page/%2e%2e%2fserver.py",
        "page/%252e%252e%252fserver.py",
        "page//etc/passwd",
        "page/%00index.html",
        "page/index.html%00",
        "/etc/passwd",
        "thumb/..%2f..%2fetc%2fpasswd",
        "view/..%2fscene.json",
        "page/INDEX.HTML",
        "page/",
    ],
)
def test_no_path_reaches_the_file_system(scene: Scene, way: str) -> None:
    """The path goes in as the server would hand it over, past the client's own tidying, whole and decoded."""
    import asyncio
    from urllib.parse import unquote

    app, sent = create_app(scene, TOKEN, {HOST}), []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    raw = HOME + way
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": unquote(raw),
        "raw_path": raw.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", HOST.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 4321),
    }
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 404
    assert json.loads(sent[1]["body"])["error"]


def test_headers_given_twice_and_websockets_are_refused(client: TestClient) -> None:
    twice = client.get(HOME, headers=[("host", HOST), ("host", "evil.example")])
    assert twice.status_code in (400, 421)
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), client.websocket_connect(HOME):
        pass


def test_own_origin_and_second_name_pass(client: TestClient) -> None:
    assert client.get(HOME, headers={"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}).status_code == 200
    assert client.get(HOME, headers={"host": "localhost:4321"}).status_code == 200


# Binding


def test_only_loopback_unless_asked_for() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_host(host, False)
    with pytest.raises(UsageError, match="--allow-remote"):
        check_host("192.0.2.1", False)
    check_host("192.0.2.1", True)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(UsageError, match="every address"):
            check_host(host, True)


def test_a_taken_port_is_an_error(scene: Scene) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LeafwardError, match="cannot listen"):
        serve(scene, lambda url: None, port=taken.getsockname()[1])


def test_a_missing_extra_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(LeafwardError, match=r"leafward\[serve\]"):
        server.create_app(scene, TOKEN, {HOST})


@pytest.mark.parametrize("times", [1, 2])
def test_the_command_serves_until_interrupted(tmp_path: Path, times: int) -> None:
    target = tmp_path / "tax.csv"
    target.write_text("child,parent\nroot,\na,root\nb,root\n")
    words = ["-m", "leafward.cli", "explore", str(target), "--no-open", "--json"]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["url"].startswith("http://127.0.0.1:")
        assert len(first["url"].rstrip("/").rpartition("/")[2]) >= 32
        with urllib.request.urlopen(f"{first['url']}scene.json", timeout=30) as answer:
            assert json.load(answer)["count"] == 3
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1])["points"] == 3
    assert "Traceback" not in err
