"""Say in an engine config what a job with images needs of its engine: stock vLLM, and the hosts of URLs."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipemax_spark.errors import JobError


def with_image_settings(
    engine: Mapping[str, Any], *, has_images: bool, allow_urls: Sequence[str] | str = ()
) -> dict[str, Any]:
    """Return the engine config for rows that have images, or for rows that have none.

    Raise ``JobError`` if the config names policy pipemax, which serves text only.
    """
    config = dict(engine)
    hosts = allow_urls.split(",") if isinstance(allow_urls, str) else allow_urls
    if not has_images:
        if allow_urls:
            raise JobError("allow-image-urls is given, and no column has images; give image-column too")
        return config
    match config.get("policy", "auto"):
        case "auto":
            config["policy"] = "vllm"
        case "pipemax":
            raise JobError(
                "policy pipemax serves text only; for images set policy: vllm in the engine config, or leave it out"
            )
    if allow_urls:
        images = config.get("images") or {}
        config["images"] = {
            **images,
            "allow_urls": [*images.get("allow_urls", ()), *(host.strip() for host in hosts)],
        }
    return config
