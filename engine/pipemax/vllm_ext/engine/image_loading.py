"""Load a row's images: read or fetch the bytes, within the limits of the config, and decode them by vLLM's own loader.

Whatever is wrong with an image is an ``invalid_image`` error of its row. Bytes are measured before they are read where
that is possible, and pixels before the image is decoded, so that no row can fill the memory.
"""

from io import BytesIO
from urllib.parse import urlsplit

from PIL import Image as PillowImage
from PIL import UnidentifiedImageError
from requests.exceptions import RequestException
from vllm.connections import global_http_connection
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from pipemax.checkpoint.image_sources import ImageSourceError, is_web_url, read_source, too_large
from pipemax.config import ImageConfig
from pipemax.generation import Image, RequestError
from pipemax.wire import ErrorCode

LoadedImage = MediaWithBytes[PillowImage.Image]


class ImageLoader:
    """Loads images within these limits. Thread-safe."""

    def __init__(self, limits: ImageConfig) -> None:
        self._limits = limits
        self._decoder = ImageMediaIO()

    def load(self, images: tuple[Image, ...]) -> list[LoadedImage] | RequestError:
        """Return a row's images, or what is wrong with the first one that cannot be had."""
        limit = self._limits.max_per_row
        if len(images) > limit:
            return _fault(f"the row has {len(images)} images, and images.max_per_row is {limit}")
        loaded = []
        for number, image in enumerate(images, start=1):
            place = f"image {number} of {len(images)}: " if len(images) > 1 else ""
            try:
                loaded.append(self._decoded(self._bytes_of(image)))
            except ImageSourceError as error:
                return _fault(f"{place}{error}")
        return loaded

    def _bytes_of(self, image: Image) -> bytes:
        limits = self._limits
        if image.content is not None:
            if len(image.content) > limits.max_bytes:
                raise ImageSourceError(too_large(len(image.content), limits.max_bytes))
            return image.content
        source = image.source or ""
        if is_web_url(source):
            return self._fetched(source)
        return read_source(source, max_bytes=limits.max_bytes, directories=limits.directories)

    def _fetched(self, url: str) -> bytes:
        limits = self._limits
        try:
            host = urlsplit(url).hostname
        except ValueError as error:
            raise ImageSourceError(f"the URL cannot be read: {error}") from None
        if "*" not in limits.allow_urls and host not in limits.allow_urls:
            raise ImageSourceError(
                f"URLs of {host} are not fetched: allow the host with --allow-image-urls {host} (images.allow_urls)"
            )
        try:
            # A redirect could lead to a host that is not allowed.
            return global_http_connection.get_bytes(
                url, timeout=limits.fetch_timeout_s, allow_redirects=False, max_bytes=limits.max_bytes
            )
        except (RequestException, VLLMValidationError, OSError, ValueError) as error:
            raise ImageSourceError(f"{url[:160]!r} cannot be fetched: {error}") from None

    def _decoded(self, content: bytes) -> LoadedImage:
        limit = self._limits.max_pixels
        try:
            width, height = open_image(BytesIO(content)).size
            if width * height > limit:
                raise ImageSourceError(
                    f"the image has {width} × {height} pixels, and images.max_pixels is {limit:,}"
                )
            return self._decoder.load_bytes(content)
        except ImageSourceError:
            raise
        except UnidentifiedImageError:
            raise ImageSourceError(
                f"its {len(content):,} bytes are no image of a known format (PNG, JPEG, WebP, …)"
            ) from None
        except Exception as error:  # decoders of many formats raise whatever they like
            raise ImageSourceError(f"the image cannot be decoded: {error}") from None


def _fault(message: str) -> RequestError:
    return RequestError(code=ErrorCode.INVALID_IMAGE, message=message)
