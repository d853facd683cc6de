"""Where images come from: which sources are read, and what is said of the others."""

import base64
import os
import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from pipemax.checkpoint.image_sources import ImageSourceError, path_of, read_source, version_of
from pipemax.generation import Image


def read(source: str, *, max_bytes: int = 100, directories: tuple[str, ...] = ("/",)) -> bytes:
    return read_source(source, max_bytes=max_bytes, directories=directories)


def test_paths_and_urls_of_the_same_file_give_its_bytes(tmp_path: Path) -> None:
    photo = tmp_path / "a photo #1.png"
    photo.write_bytes(b"\x89PNG")
    data = f"data:image/png;base64,{base64.b64encode(b'x').decode()}"
    assert read(str(photo)) == read(photo.as_uri()) == b"\x89PNG"
    assert (read(data), read("data:,a%20b")) == (b"x", b"a b")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("/Volumes/main/photos/a.png", "/Volumes/main/photos/a.png"),
        ("dbfs:/Volumes/main/photos/a.png", "/Volumes/main/photos/a.png"),
        ("dbfs:/photos/a.png", "/dbfs/photos/a.png"),
        ("dbfs:/photos/a%20b#1?.png", "/dbfs/photos/a%20b#1?.png"),
        ("file:/a%20b.png", "/a%20b.png"),
        ("file:/a b#1?c=%2F.png", "/a b#1?c=%2F.png"),
        ("file:///a%20b.png", "/a b.png"),
        ("file:///a%20b#1?.png", "/a b#1?.png"),
        ("FILE://localhost/a.png", "/a.png"),
        ("/a%20b.png", "/a%20b.png"),
        ("/a:b/c#1?%.png", "/a:b/c#1?%.png"),
    ],
)
def test_databricks_and_file_urls_are_local_paths(source: str, path: str) -> None:
    assert path_of(source) == Path(path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/no/such.png", "does not exist"),
        ("relative.png", "is not an absolute path"),
        ("s3://bucket/a.png", "binaryFile"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,???", "is not base64"),
        ("data:image/png;base64,AAAAA", "is not base64"),
        ("data:image/png;base64,AA=A", "is not base64"),
        ("data:image/png;base64,AA%3FA", "is not base64"),
        ("data:image/png;base64,AAé", "is not base64"),
        ("data:image/png;charset=utf-8", "no comma"),
        (f"data:;base64,{'A' * 140}", "has 105 bytes, and images.max_bytes is 100"),
        (f"data:,{'x' * 300}", "images.max_bytes is 100"),
        ("/dev/zero", "is not a file"),
        ("/proc", "is not a file"),
        (
            "/proc/kmsg",
            "is empty|is not a file|cannot be read",
        ),  # a read would wait for the kernel to say more
        ("/a\0b", "cannot be read|is no path|does not exist"),
    ],
)
def test_a_source_that_cannot_be_read_says_why(source: str, says: str) -> None:
    with pytest.raises(ImageSourceError, match=says):
        read(source)


@pytest.mark.parametrize(
    "write",
    [
        lambda text: f"data:image/png;base64,{text}",
        lambda text: f"DATA:image/png;BASE64,{text}",
        lambda text: f"data:;base64,{text}",
        lambda text: f"data:image/png;charset=utf-8;name=a.png;base64,{text}",
        lambda text: f"data:image/png; base64,{text}",
        lambda text: f"data:image/png;base64;charset=utf-8,{text}",
        lambda text: f" data:image/png;base64, {text}\n",
        lambda text: "data:image/png;base64," + "\r\n".join(textwrap.wrap(text, 7)),
        lambda text: "data:image/png;base64," + "%0A\t".join(textwrap.wrap(text, 3)),
        lambda text: "data:image/png;base64," + text.replace("+", "-").replace("/", "_"),
        lambda text: "data:image/png;base64," + text.rstrip("="),
        lambda text: "data:image/png;base64," + text.replace("+", "-").replace("/", "_").rstrip("="),
        lambda text: "data:image/png;base64," + quote(text, safe=""),
        lambda text: "data:image/png;base64," + "".join(f"%{ord(letter):02x}" for letter in text),
    ],
)
def test_base64_is_read_in_every_form_in_which_it_is_written(write: Callable[[str], str]) -> None:
    rng = random.Random(44)
    for size in range(60):
        content = rng.randbytes(size)
        source = write(base64.b64encode(content).decode())
        assert read(source) == content, source
        assert version_of(Image(source=source)) == []


def test_only_files_of_the_directories_and_up_to_the_limit_are_read(tmp_path: Path) -> None:
    photos, secret = tmp_path / "photos", tmp_path / "secret.png"
    photos.mkdir()
    secret.write_bytes(b"s")
    (photos / "large.png").write_bytes(bytes(101))
    (photos / "link.png").symlink_to(secret)
    for source, says in (
        (str(photos / "large.png"), "has 101 bytes, and images.max_bytes is 100"),
        (str(photos / "link.png"), "images.directories"),
        (str(photos / ".." / "secret.png"), "images.directories"),
    ):
        with pytest.raises(ImageSourceError, match=says):
            read(source, directories=(str(photos),))


def test_a_file_that_is_written_again_is_another_version(tmp_path: Path) -> None:
    photo = tmp_path / "a.png"
    photo.write_bytes(b"x")
    os.utime(photo, ns=(1, 1))
    image = Image(source=str(photo))
    first = version_of(image)
    assert first == version_of(image) != []
    os.utime(photo, ns=(2, 2))
    assert version_of(image) != first
    assert version_of(Image(content=b"x")) == version_of(Image(source="/none")) == []
