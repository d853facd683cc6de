"""An OpenAI-compatible server that is careless with keys: it repeats them in all that it says; by TLS if it is told.

And the certificates of an authority that nobody knows, and a proxy that counts what it passes on.
"""

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.waiting import wait_until

MODEL = "careless"
REFUSED, FILTERED, SAID, BROKEN = "refuse this", "filter this", "say the key", "break this once"


class KeysServer:
    """What it was sent; the counts grow as requests come."""

    def __init__(self, port: int, *, is_tls: bool) -> None:
        self.url = f"{'https' if is_tls else 'http'}://127.0.0.1:{port}/v1"
        self.port = port
        self.seen: list[tuple[str, str]] = []
        """Path and all headers, as one text."""
        self.redirects: dict[str, str] = {}
        """Path → where it redirects to."""
        self.broken: set[str] = set()
        self.num_answered = 0
        self.refuses_after = 0
        """A row that is refused waits until so many others are answered."""

    def config(self, **changes: Any) -> dict[str, Any]:
        """An engine config that names this server."""
        return {"endpoint": self.url, "model": MODEL, "model_revision": "1", **changes}

    def headers_with(self, text: str) -> int:
        """How many requests had this text in their headers."""
        return sum(text in headers for _, headers in self.seen)


@contextmanager
def keys_server(key: str, *, certificate: Path | None = None) -> Iterator[KeysServer]:
    """Serve on the loopback; ``certificate`` is a PEM file with its key."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # the name that the standard library calls
            self._serve({})

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _serve(self, body: dict[str, Any]) -> None:
            server.seen.append((self.path, str(self.headers)))
            if (target := server.redirects.get(self.path)) is not None:
                self._answer(307, {}, Location=target)
            elif key not in str(self.headers):
                self._answer(401, _error(f"no such key; {key} is right"))
            elif self.path == "/v1/models":
                self._answer(200, {"data": [{"id": MODEL, "max_model_len": 512}]})
            else:
                if REFUSED in str(body):
                    wait_until(
                        lambda: server.num_answered >= server.refuses_after, what="others are answered"
                    )
                status, answer = _completion(body, key, server.broken)
                self._answer(status, answer)
                server.num_answered += status == 200

        def _answer(self, status: int, values: Any, **headers: str) -> None:
            content = json.dumps(values).replace("/", "\\/").encode()  # as some servers write it
            self.send_response(status, f"with {key}")
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        http.socket = context.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
    server = KeysServer(http.server_port, is_tls=certificate is not None)
    with _serving(http):
        yield server


@contextmanager
def _serving(http: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def _error(message: str, **fields: str) -> dict[str, Any]:
    return {"error": {"message": message, **fields}}


def _completion(body: dict[str, Any], key: str, broken: set[str]) -> tuple[int, Any]:
    prompt = body["messages"][-1]["content"]
    if REFUSED in prompt:
        return 400, _error(f"{key} may not ask for {prompt}")
    if FILTERED in prompt:
        return 400, _error(f"{key} was filtered", code="content_filter")
    if BROKEN in prompt and prompt not in broken:
        broken.add(prompt)
        return 500, _error(f"an accident with {key}")
    said = f"the key is {key}" if SAID in prompt else f"reply to {prompt}"
    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(said.split())}
    return 200, {"model": MODEL, "choices": [choice], "usage": usage}


class Authority:
    """An authority of its own; ``ca_file`` has its certificate."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "The company's own authority")])
        certificate = self._signed(self._name, self._key, x509.BasicConstraints(ca=True, path_length=0))
        self.ca_file = directory / "authority.pem"
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def certificate(self, name: x509.GeneralName) -> Path:
        """Return a PEM file with a certificate of a server of this name, and with its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        signed = self._signed(subject, key, x509.SubjectAlternativeName([name]))
        path = self._directory / f"server-{signed.serial_number}.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + signed.public_bytes(serialization.Encoding.PEM)
        )
        return path

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )


class Proxy:
    """What a proxy passed on: ``CONNECT host:port`` or the whole URL of each request."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.passed: list[str] = []


@contextmanager
def proxy_server(target: int) -> Iterator[Proxy]:
    """Pass on tunnels and plain requests to this port of the loopback, whatever host they name."""

    class Handler(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            proxy.passed.append(f"CONNECT {self.path}")
            with socket.create_connection(("127.0.0.1", target)) as there:
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=_copy, args=(there, self.connection))
                back.start()
                _copy(self.connection, there)
                back.join()
            self.close_connection = True

        def do_GET(self) -> None:
            proxy.passed.append(self.path)
            path = "/" + self.path.split("/", 3)[3]
            with socket.create_connection(("127.0.0.1", target)) as there:
                headers = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
                there.sendall(f"GET {path} HTTP/1.0\r\n{headers}\r\n".encode())
                there.shutdown(socket.SHUT_WR)
                _copy(there, self.connection)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    proxy = Proxy(http.server_port)
    with _serving(http):
        yield proxy


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while content := source.recv(65_536):
            sink.sendall(content)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # one of them is gone
