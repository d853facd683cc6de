"""The versions that both sides of a session compare."""

import pipemax

PACKAGE_VERSION = pipemax.__version__
WIRE_VERSION = 12
"""Incremented whenever a schema or message of this package changes its meaning; both sides must agree exactly."""

VERSION_METADATA = {
    b"pipemax_wire_version": str(WIRE_VERSION).encode(),
    b"pipemax_package_version": PACKAGE_VERSION.encode(),
}
"""Metadata of the server's answer schema, so that the client can check the version too."""
