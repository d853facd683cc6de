"""Images at URLs: fetched from allowed hosts only, within the limits, and without following redirects."""

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image as PillowImage

from pipemax.config import ImageConfig
from pipemax.generation import Image, RequestError
from pipemax.vllm_ext.engine.image_loading import ImageLoader
from pipemax.wire import ErrorCode


def png() -> bytes:
    buffer = io.BytesIO()
    PillowImage.new("RGB", (8, 4), (1, 2, 3)).save(buffer, "PNG")
    return buffer.getvalue()


class _Photos(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = {
            "/a.png": (200, png()),
            "/large.png": (200, bytes(5_000)),
            "/moved.png": (302, b""),
            "/page": (200, b"<html>"),
        }.get(self.path, (404, b"none"))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/a.png")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(scope="module")
def photos() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Photos) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def load(*sources: str, **limits: object) -> list[tuple[int, int]] | str:
    """The sizes of the images, or the message of the row's error."""
    found = ImageLoader(ImageConfig.model_validate(limits)).load(
        tuple(Image(source=source) for source in sources)
    )
    if isinstance(found, RequestError):
        assert found.code == ErrorCode.INVALID_IMAGE
        return found.message
    return [image.media.size for image in found]


@pytest.mark.parametrize("hosts", [("127.0.0.1",), ("*",)])
def test_an_image_of_an_allowed_host_is_fetched(photos: str, hosts: tuple[str, ...]) -> None:
    assert load(f"{photos}/a.png", allow_urls=hosts) == [(8, 4)]


def test_no_other_host_is_asked(photos: str) -> None:
    assert "URLs of 127.0.0.1 are not fetched" in load(f"{photos}/a.png")
    assert "not fetched" in load(f"{photos}/a.png", allow_urls=("example.org",))
    sneaky = photos.replace("http://", "HTTP://example.org@") + "/a.png"
    assert "URLs of 127.0.0.1 are not fetched" in load(sneaky, allow_urls=("example.org",))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("large.png", "exceeded maximum size"),
        ("none.png", "404"),
        ("moved.png", "are no image of a known format"),
        ("page", "are no image of a known format"),
    ],
)
def test_what_is_no_image_there_is_the_row_s_error(photos: str, path: str, says: str) -> None:
    told = load(f"{photos}/a.png", f"{photos}/{path}", allow_urls=("127.0.0.1",), max_bytes=1_000)
    assert isinstance(told, str)
    assert told.startswith("image 2 of 2: ")
    assert says in told
