"""A real S3 API on loopback, and a wire to it that can be cut or held."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import boto3
from tests.ports import unused_port

_TIMEOUT_SECONDS = 60.0
_CHUNK_BYTES = 1 << 16


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class ObjectStore:
    """moto's S3 server in a process of its own, with a client that it obeys."""

    def __init__(self) -> None:
        self.port = unused_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)
        self.client = self.new_client("s3")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def new_client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def keys(self, bucket: str) -> list[str]:
        """Return the keys of all objects in a bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def copies(self, bucket: str) -> list[str]:
        """Return the keys of the manifests, newest last: those of the complete copies."""
        return sorted(key for key in self.keys(bucket) if key.endswith("/manifest.json"))

    def newest_step(self, bucket: str) -> int | None:
        """Return the step of the newest complete copy, or None."""
        copies = self.copies(bucket)
        return int(copies[-1].split("-step")[1][:8]) if copies else None

    def flip_byte(self, bucket: str, key: str) -> None:
        contents = bytearray(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())
        contents[len(contents) // 2] ^= 1
        self.client.put_object(Bucket=bucket, Key=key, Body=bytes(contents))

    @contextlib.contextmanager
    def checking_rights(self) -> Iterator[None]:
        """Answer only requests that are signed by a user who has the right, as AWS does."""
        self._check_rights_after(0)
        try:
            yield
        finally:
            self._check_rights_after(2**31)

    def _check_rights_after(self, requests: int) -> None:
        """Check no rights for a number of requests from now on, and then those of each."""
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth", data=str(requests).encode(), method="POST"
        )
        request.add_header("Content-Type", "text/plain")
        urllib.request.urlopen(request).close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Wire:
    """A relay in front of a server."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._is_cut = False
        # Bytes that may still pass to the server. None: any number.
        self._may_pass: int | None = None
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        """Break all connections, and refuse new ones."""
        self._is_cut = True
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    def hold_after(self, size_bytes: int) -> None:
        """Let so many bytes pass to the server, and then nothing more, without an error."""
        self._may_pass = size_bytes

    @property
    def is_holding(self) -> bool:
        return self._may_pass == 0

    def close(self) -> None:
        self.cut()
        # This ends the thread that accepts connections.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for connection in self._sockets:
            connection.close()

    def _start(self, work: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._sockets += [client, server]
            self._start(self._relay, client, server, True)
            self._start(self._relay, server, client, False)

    def _relay(self, source: socket.socket, target: socket.socket, is_upload: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if is_upload and self._may_pass is not None:
                    self._may_pass = max(0, self._may_pass - len(data))
                while is_upload and self.is_holding and not self._is_cut:
                    time.sleep(0.01)
                target.sendall(data)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def running_store() -> Iterator[ObjectStore]:
    store = ObjectStore()
    try:
        yield store
    finally:
        store.close()
