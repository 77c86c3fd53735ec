"""One Redis or Valkey server through valkey-glide: requests that end at their time limit, errors as ours.

Every node of a cluster gets clients of its own, which know nothing of the others: glide's client for whole clusters lets
requests to living nodes wait for one that is paused.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvpool.errors import ConfigError
from kvpool.tiers.remote.breaker import Breaker
from kvpool.tiers.remote.redis_options import RedisOptions
from kvpool.tiers.remote.remote_tier import Node, NodeError

_MOVED = ("Moved:", "Ask:", "TryAgain:", "MOVED", "ASK ", "TRYAGAIN")


class Refusal:
    """A command that the server answered with an error."""

    def __init__(self, error: Exception) -> None:
        self.text = _said(error)

    @property
    def moved(self) -> bool:
        """The key lives on another node now."""
        return any(word in self.text for word in _MOVED)

    @property
    def is_about_the_value(self) -> bool:
        """Something else than a string lies under this name; other keys are not concerned."""
        return "WRONGTYPE" in self.text


class RedisNode(Node):
    """One server, and the connections to it."""

    def __init__(self, host: str, port: int, options: RedisOptions) -> None:
        super().__init__(f"{host}:{port}", options.connections, Breaker(pause=options.pause, proven=False))
        self.host, self._port = host, port
        self.direct_seconds = options.timeout / 4
        self._glide = import_glide()
        self._clients = [self._client(host, port, options) for _ in range(options.connections)]
        self._idle = list(self._clients)
        self._lock = threading.Lock()
        self._num_users = 0
        self._closing = False

    def _client(self, host: str, port: int, options: RedisOptions) -> Any:
        """A client that connects with its first request."""
        glide = self._glide
        credentials = None
        if options.password is not None:
            credentials = glide.ServerCredentials(options.password, options.user)
        tls = None
        if options.tls:
            tls = glide.TlsAdvancedConfiguration(
                root_pem_cacerts=options.ca, client_cert_pem=options.cert, client_key_pem=options.key
            )
        configuration = glide.GlideClientConfiguration(
            [glide.NodeAddress(host, port)],
            use_tls=options.tls,
            credentials=credentials,
            database_id=options.database,
            request_timeout=_milliseconds(self.direct_seconds),
            lazy_connect=True,
            client_info_tag="kvpool",
            advanced_config=glide.AdvancedGlideClientConfiguration(
                connection_timeout=_milliseconds(options.timeout), tls_config=tls
            ),
        )
        return glide.GlideClient.create(configuration)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """A connection that nobody else uses, or one of them where all are in use. It stays open until it is given back."""
        with self._lock:
            if self._closing:
                raise NodeError("closed")
            self._num_users += 1
            own = self._idle.pop() if self._idle else None
        try:
            yield own or self._clients[0]
        finally:
            with self._lock:
                self._num_users -= 1
                if own is not None:
                    self._idle.append(own)
                last = self._closing and not self._num_users
            if last:
                self._close_clients()

    def run(self, client: Any, commands: Sequence[Sequence[Any]], seconds: float) -> list[Any]:
        """The answers to commands that travel together, each a value or a `Refusal`."""
        with self.asking():
            return self._send(client, commands, seconds)

    def read_into(self, client: Any, name: str, view: memoryview) -> int | None:
        """Reads a string straight into memory, in at most `direct_seconds`: its length, None if there is none, -1 if it is no
        string or longer."""
        with self.asking(), self._translated():
            try:
                answer = client.get(name, buffer=view)
            except self._glide.RequestError as error:
                if "exceeds buffer" in str(error) or "WRONGTYPE" in str(error):
                    return -1
                raise
        return None if answer is None else int(answer)

    def check(self, seconds: float) -> None:
        """Connects every client and waits for an answer to each."""
        self._reach(seconds)
        with self.connection():
            for client in self._clients:
                self._answer(client, ["PING"], seconds)

    def cluster_slots(self, seconds: float) -> Any:
        """What the node answers to CLUSTER SLOTS."""
        self._reach(seconds)
        with self.connection() as client:
            return self._answer(client, ["CLUSTER", "SLOTS"], seconds)

    def close(self) -> None:
        """Lets go of threads, and of connections when the last request is over."""
        super().close()
        with self._lock:
            self._closing = True
            idle = not self._num_users
        if idle:
            self._close_clients()

    def _reach(self, seconds: float) -> None:
        """Connects without the client: it prints a line for each request that fails, and nothing switches that off."""
        try:
            socket.create_connection((self.host, self._port), seconds).close()
        except TimeoutError:
            raise
        except OSError as error:
            raise NodeError(error.strerror or str(error)) from None

    def _answer(self, client: Any, command: list[str], seconds: float) -> Any:
        answer = self._send(client, [command], seconds)[0]
        if isinstance(answer, Refusal):
            raise NodeError(answer.text)
        return answer

    def _send(self, client: Any, commands: Sequence[Sequence[Any]], seconds: float) -> list[Any]:
        batch = self._glide.Batch(False)
        for command in commands:
            batch.custom_command(list(command))
        with self._translated():
            answers = client.exec(batch, False, self._glide.BatchOptions(timeout=_milliseconds(seconds)))
        return [Refusal(answer) if isinstance(answer, Exception) else answer for answer in answers]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The client's errors as ours."""
        try:
            yield
        except self._glide.TimeoutError:
            raise TimeoutError from None
        except self._glide.GlideError as error:
            raise NodeError(_said(error)) from None

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()


def import_glide() -> Any:
    """The client library, quiet unless the program configured its log."""
    try:
        import glide_sync
        from glide_shared.logger import Level
    except ImportError:
        raise ConfigError("redis:// tiers need valkey-glide-sync: pip install 'kvpool[redis]'") from None
    glide_sync.Logger.init(Level.OFF)
    return glide_sync


def _said(error: Exception) -> str:
    """What a server or the client said, on one line. Neither repeats passwords."""
    return " ".join(str(error).split())


def _milliseconds(seconds: float) -> int:
    return min(max(1, int(seconds * 1000)), 2**31 - 1)
