"""A server of public keys, such as identity providers have."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.servers.authority import Authority
from tests.servers.tokens import SigningKey

KEY = SigningKey()
#: A status that makes the server answer in another protocol.
NO_HTTP = 0


class Issuer:
    """A server, https if it gets an authority, that answers every request as a test wants.

    Attributes:
        url: Of the keys.
        requests: Paths that were asked for.
        body: The answer; None closes the connection.
        status, location: Of the answer.
        delay_s: Time before it.
        wait: What it waits for, too.
    """

    def __init__(self, authority: Authority | None = None) -> None:
        self.requests: list[str] = []
        self.status, self.location, self.delay_s = 200, "", 0.0
        self.wait: Callable[[], object] = lambda: None
        self.body: bytes | None = b""
        self.publish(KEY)
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.requests.append(self.path)
                time.sleep(issuer.delay_s)
                issuer.wait()
                if issuer.body is None:
                    return
                if issuer.status == NO_HTTP:
                    self.wfile.write(b"SSH-2.0-x\r\n")
                    return
                self.send_response(issuer.status)
                if issuer.location:
                    self.send_header("Location", issuer.location)
                self.end_headers()
                self.wfile.write(issuer.body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if authority is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*authority.issue("issuer"))
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if authority is None else "https"
        self.url = f"{scheme}://localhost:{self._server.server_address[1]}/jwks.json"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def publish(self, *keys: SigningKey) -> None:
        self.body = json.dumps({"keys": [key.jwk for key in keys]}).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
