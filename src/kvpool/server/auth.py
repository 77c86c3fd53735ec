"""API keys. The server keeps only their SHA-256. Each key belongs to a tenant, and tenants do not share cached prefixes."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvpool.errors import ConfigError
from kvpool.files import read_plain
from kvpool.server.errors import Problem

ENVIRONMENT = "KVPOOL_API_KEYS"
_ADMIN = "admin"


class Caller(NamedTuple):
    """Who asks. Without keys there is one caller, who may do everything."""

    tenant: str = ""
    is_admin: bool = True
    key: str = ""  # a name for the key in counters, not the secret


class CacheShare(NamedTuple):
    """How much of the cache a tenant may keep: blocks (int), or a fraction of each GPU pool (float).

    Other tenants cannot evict its `guaranteed` blocks. If it has more than `maximum`, its own blocks are evicted first.
    """

    guaranteed: int | float = 0
    maximum: int | float | None = None


class Access:
    """The callers by the SHA-256 of their keys. Without keys, everybody has access.

    >>> access = Access({hashlib.sha256(b"sk-1").hexdigest(): Caller("acme", False, "acme")})
    >>> access.caller("sk-1").tenant
    'acme'
    """

    def __init__(
        self,
        callers: Mapping[str, Caller] | None = None,
        *,
        share: bool = False,
        quotas: Mapping[str, CacheShare] | None = None,
    ) -> None:
        self._callers = dict(callers or {})
        self._share = share
        self.quotas = dict(quotas or {})  # by tenant
        if share and self.quotas:
            raise ConfigError(f"tenants that share one cache have no quotas of it, but {min(self.quotas)!r} has one")

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._callers

    def caller(self, key: str | None) -> Caller:
        """The caller with that key: `Authorization: Bearer KEY` or, as Anthropic's clients send it, `x-api-key: KEY`."""
        if self.is_open:
            return Caller()
        if not key:
            raise Problem(401, "this server needs a key: send 'Authorization: Bearer KEY'", code="missing_api_key")
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for known, caller in self._callers.items():  # always all of them, so that the time reveals nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise Problem(401, "this key is not known here", code="invalid_api_key")
        return found._replace(tenant="") if self._share else found

    @classmethod
    def read(cls, file: Path | None, environment: Mapping[str, str], *, share: bool = False) -> Access:
        """Reads keys from a file (lines `TENANT SHA256 [admin]`) and the environment (`TENANT:KEY[:admin]`, with commas).

        A line of the file may end with `guaranteed=` and `maximum=`: the tenant's quota, such as `10%` or `500` (blocks).
        """
        callers: dict[str, Caller] = {}
        quotas: dict[str, CacheShare] = {}
        if file is not None:
            try:
                text = read_plain(file).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                problem = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
                remedy = "name a file of lines TENANT SHA256 [admin], as `kvpool serve --new-key` prints them"
                raise ConfigError(f"cannot read the keys in {str(file)!r}: {problem}; {remedy}") from None
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip() and line[0] != "#":
                    where, words = f"{file}, line {number}", line.split()
                    _add(callers, where, [word for word in words if "=" not in word])
                    _add_quota(quotas, where, words[0], [word for word in words if "=" in word])
        for item in filter(None, environment.get(ENVIRONMENT, "").split(",")):
            tenant, _, rest = item.strip().partition(":")
            key, _, role = rest.partition(":")
            digest = hashlib.sha256(key.encode()).hexdigest() if key else ""
            _add(callers, f"an entry of {ENVIRONMENT}", [tenant, digest, *([role] if role else [])])
        if file is not None and not callers:
            raise ConfigError(f"there is no key in {str(file)!r}; `kvpool serve --new-key TENANT` makes one")
        return cls(callers, share=share, quotas=quotas)


def _add(callers: dict[str, Caller], where: str, words: list[str]) -> None:
    digest = words[1].lower() if len(words) > 1 else ""
    if len(words) not in (2, 3) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ConfigError(f"{where} is no key: write TENANT SHA256 [admin], as `kvpool serve --new-key` prints it")
    if len(words) == 3 and words[2] != _ADMIN:
        raise ConfigError(f"{where} has the role {words[2]!r}; the only one is {_ADMIN!r}")
    callers[digest] = Caller(words[0], len(words) == 3, f"{words[0]}/{digest[:8]}")


def _add_quota(quotas: dict[str, CacheShare], where: str, tenant: str, settings: list[str]) -> None:
    """Records the quota of a line, if it has one. A tenant with several keys gives it once, or the same each time."""
    given: dict[str, int | float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in CacheShare._fields or name in given:
            raise ConfigError(
                f"{where} has the setting {setting!r}; there are guaranteed=SHARE and maximum=SHARE, once each"
            )
        given[name] = _share(where, value)
    if given and quotas.setdefault(tenant, CacheShare(**given)) != CacheShare(**given):
        raise ConfigError(f"{where} gives the tenant {tenant!r} another quota than a line before")


def _share(where: str, text: str) -> int | float:
    """A share of the cache as people write it.

    >>> [_share("", text) for text in ("20%", "0.5", "500")]
    [0.2, 0.5, 500]
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%|(0?\.\d+|[01]\.\d+)|(\d{1,12})", text)
    if found is None or (found[1] and float(found[1]) > 100) or (found[2] and float(found[2]) > 1):
        raise ConfigError(f"{where} has the share {text!r}; write 20%, 0.2, or a number of blocks")
    percent, fraction, blocks = found.groups()
    return float(percent) / 100 if percent else float(fraction) if fraction else int(blocks)


def new_key(tenant: str) -> tuple[str, str]:
    """A new secret key and the line for the file of keys."""
    key = "kv-" + secrets.token_urlsafe(32)
    return key, f"{tenant} {hashlib.sha256(key.encode()).hexdigest()}"
