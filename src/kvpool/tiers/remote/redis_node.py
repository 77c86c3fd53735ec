"""One Redis or Valkey server through valkey-glide, and what the address of a tier says about it.

Requests end at their time limit, and errors of the client become errors of kvpool. Every node of a cluster gets its own
clients, because with glide's cluster client, requests to healthy nodes wait for one that is paused.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.checks import show
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.files import read_plain
from kvpool.tiers.contract import CALL_TIMEOUT
from kvpool.tiers.options import ANY_TEXT, FLAG, NAMESPACE, SECONDS, TierURL, count, option, read_options, size
from kvpool.tiers.remote.breaker import FIRST_PAUSE, Breaker
from kvpool.tiers.remote.remote_tier import NodeError, StoreNode

DEFAULT_PORT = 6379
MAX_VALUE_BYTES = 512 << 20  # the longest string that Redis takes


@dataclass(frozen=True)
class RedisOptions:
    """The parts of an address. `ca`, `cert` and `key` are paths of files in the address; here they are the bytes."""

    seeds: tuple[tuple[str, int], ...]
    database: int
    tls: bool
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    cluster: bool = option(FLAG, False)
    nodes: str = option(ANY_TEXT, "")
    namespace: str = option(NAMESPACE, "default")
    ttl: float | None = option(SECONDS, None)
    timeout: float = option(SECONDS, CALL_TIMEOUT)
    max_value_bytes: int = option(size(1, MAX_VALUE_BYTES), MAX_VALUE_BYTES)
    connections: int = option(count(1, 16), 2)
    pause: float = option(SECONDS, FIRST_PAUSE)
    ca: bytes | None = option(ANY_TEXT, None)
    cert: bytes | None = option(ANY_TEXT, None)
    key: bytes | None = option(ANY_TEXT, None)

    @classmethod
    def of(cls, url: TierURL) -> RedisOptions:
        """Reads the parts of an address; raises for the first that is wrong."""
        if url.user is not None and url.password is None:
            raise InvalidArgumentError(f"{url.shown}: a user needs a password, redis://user:password@host")
        found = read_options(cls, url)
        seeds = [(url.host, url.port or DEFAULT_PORT)]
        seeds += [_address(text, url) for text in found["nodes"].split(",") if text]
        if len(seeds) > 1 and not found["cluster"]:
            raise InvalidArgumentError(f"{url.shown}: nodes= names more nodes of a cluster, so it needs cluster=1")
        found |= {name: _file(found[name], name, url) for name in ("ca", "cert", "key")}
        if (found["ca"] or found["cert"] or found["key"]) and url.scheme != "rediss":
            raise InvalidArgumentError(f"{url.shown}: ca, cert and key are for TLS, so write rediss:// for redis://")
        if (found["cert"] is None) != (found["key"] is None):
            raise InvalidArgumentError(f"{url.shown}: cert and key belong together, one of them is missing")
        return cls(
            tuple(dict.fromkeys(seeds)),
            _database(url, found["cluster"]),
            url.scheme == "rediss",
            url.user,
            url.password,
            **found,
        )


def _address(text: str, url: TierURL) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(f"nodes={show(text)} of {url.shown} must be host:port, several divided by commas")
    return host.strip("[]"), int(port)


def _database(url: TierURL, cluster: bool) -> int:
    text = url.path.strip("/")
    if text and not (text.isdigit() and int(text) < 2**31):
        raise InvalidArgumentError(f"the path of {url.shown} is the number of a database, got {show(text)}")
    if cluster and text not in ("", "0"):
        raise InvalidArgumentError(f"{url.shown}: a cluster has database 0 only; use namespace= to keep values apart")
    return int(text or 0)


def _file(path: str | None, name: str, url: TierURL) -> bytes | None:
    if not path:
        return None
    try:
        return read_plain(Path(path))
    except OSError as error:
        raise InvalidArgumentError(f"{name}={show(path)} of {url.shown} cannot be read: {error.strerror}") from None


_MOVED = ("Moved:", "Ask:", "TryAgain:", "MOVED", "ASK ", "TRYAGAIN")


class CommandError:
    """A command that the server answered with an error."""

    def __init__(self, error: Exception) -> None:
        self.text = _message(error)

    @property
    def moved(self) -> bool:
        """The key lives on another node now."""
        return any(word in self.text for word in _MOVED)

    @property
    def is_about_the_value(self) -> bool:
        """The name holds something else than a string. Other keys are not affected."""
        return "WRONGTYPE" in self.text


class RedisNode(StoreNode):
    """One server, and the connections to it."""

    def __init__(self, host: str, port: int, options: RedisOptions) -> None:
        super().__init__(f"{host}:{port}", options.connections, Breaker(pause=options.pause, proven=False))
        self.host, self._port = host, port
        self.direct_seconds = options.timeout / 4
        self._is_encrypted = options.tls
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
        """A connection that no other thread uses; if all are in use, the first one. It stays open until it is returned."""
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
        """The answers to commands that are sent together, each a value or a `CommandError`."""
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
        """Closes threads, and closes connections when the last request is over."""
        super().close()
        with self._lock:
            self._closing = True
            idle = not self._num_users
        if idle:
            self._close_clients()

    def _reach(self, seconds: float) -> None:
        """Asks for any answer without the client, which would print a line for each failure that cannot be turned off."""
        try:
            with socket.create_connection((self.host, self._port), seconds) as connection:
                if not self._is_encrypted:
                    connection.settimeout(seconds)
                    connection.sendall(b"*1\r\n$4\r\nPING\r\n")
                    if not connection.recv(1):
                        raise NodeError("it closed the connection")
        except TimeoutError:
            raise
        except OSError as error:
            raise NodeError(error.strerror or str(error)) from None

    def _answer(self, client: Any, command: list[str], seconds: float) -> Any:
        answer = self._send(client, [command], seconds)[0]
        if isinstance(answer, CommandError):
            raise NodeError(answer.text)
        return answer

    def _send(self, client: Any, commands: Sequence[Sequence[Any]], seconds: float) -> list[Any]:
        batch = self._glide.Batch(False)
        for command in commands:
            batch.custom_command(list(command))
        with self._translated():
            answers = client.exec(batch, False, self._glide.BatchOptions(timeout=_milliseconds(seconds)))
        return [CommandError(answer) if isinstance(answer, Exception) else answer for answer in answers]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The client's errors as ours."""
        try:
            yield
        except self._glide.TimeoutError:
            raise TimeoutError from None
        except self._glide.GlideError as error:
            raise NodeError(_message(error)) from None

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()


def import_glide() -> Any:
    """The client library, quiet unless the program configured its log."""
    try:
        import glide_sync
        from glide_shared.logger import Level
    except ImportError:
        raise ConfigError(
            "redis:// tiers need valkey-glide-sync: pip install '.[redis]' in a checkout of kvpool"
        ) from None
    glide_sync.Logger.init(Level.OFF)
    return glide_sync


def _message(error: Exception) -> str:
    """An error message of the server or client on one line. Neither contains passwords."""
    return " ".join(str(error).split())


def _milliseconds(seconds: float) -> int:
    return min(max(1, int(seconds * 1000)), 2**31 - 1)
