"""Opens tiers by their addresses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from kvpool.checks import show
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.tiers.compressed_tier import CompressedTier, CompressionOptions, make_codec
from kvpool.tiers.contract import KeyedTier
from kvpool.tiers.disk import DiskOptions, DiskTier
from kvpool.tiers.keys import KeySpace
from kvpool.tiers.node.node_tier import NodeTier
from kvpool.tiers.options import TierURL, option_kinds, read_options
from kvpool.tiers.remote.mooncake import MooncakeTier
from kvpool.tiers.remote.redis import RedisTier
from kvpool.tiers.remote.s3 import S3Tier

Opener = Callable[[str], KeyedTier]
_Opener = TypeVar("_Opener", bound=Opener)
ENTRY_POINTS = "kvpool.tiers"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")


def register_tier(scheme: str) -> Callable[[_Opener], _Opener]:
    """Decorates a class or a function that opens a tier: `open_tier("SCHEME:...")` calls it with the whole address.

    From then on, every setting that takes an address takes this one in the same process: `Engine(remote="SCHEME://...")`,
    `CachePool`, the connectors. The options `compress` and `dtype` are taken out of the address before. Registering under the
    same name again replaces it (a notebook cell run twice); taking the scheme of another opener is an error.

    A package whose tier other processes open, too, such as the workers of vLLM, names the opener in its metadata:
    `[project.entry-points."kvpool.tiers"]` with `mine = "my_package:open_mine"`. It is loaded for the first such address.

    >>> from kvpool.tiers import MemoryTier
    >>> @register_tier("ram")
    ... def open_ram(address: str) -> MemoryTier:
    ...     return MemoryTier(2**20)
    >>> open_tier("ram:").name
    'memory'
    """
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise InvalidArgumentError(f'{show(scheme)} is no scheme of an address; write @register_tier("name")')

    def register(opener: _Opener) -> _Opener:
        holder = _OPENERS.get(scheme)
        if holder is not None and _qualified(holder) != _qualified(opener):
            raise InvalidArgumentError(f"the scheme {scheme!r} is taken by {holder.__qualname__}; choose another")
        _OPENERS[scheme] = opener
        return opener

    return register


def opener_of(scheme: str) -> Opener | None:
    """What opens addresses with this scheme; None if nobody has registered it and no installed package names it."""
    if scheme not in _OPENERS:
        for point in entry_points(group=ENTRY_POINTS, name=scheme):
            try:
                opener = point.load()
            except Exception as error:  # the package may raise anything
                raise ConfigError(
                    f"{point.value}, which opens {scheme}: addresses, cannot be loaded: {error}"
                ) from error
            register_tier(scheme)(opener)
    return _OPENERS.get(scheme)


def schemes() -> str:
    """All that an address may begin with, for errors."""
    names = [*_OPENERS, *(point.name for point in entry_points(group=ENTRY_POINTS))]
    return ", ".join(f"{name}:" for name in dict.fromkeys(names))


def _qualified(opener: Opener) -> tuple[str, str]:
    return opener.__module__, opener.__qualname__


def open_tiers(addresses: Iterable[str | None], space: KeySpace) -> list[KeyedTier]:
    """Opens the tiers at some addresses, for keys of `space`; None is no tier. If one fails to open, all are closed."""
    opened: list[KeyedTier] = []
    try:
        for address in addresses:
            if address is not None:
                opened.append(open_tier(address))
                opened[-1].introduce(space)
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return opened


def open_tier(address: str | os.PathLike[str]) -> KeyedTier:
    """The tier at an address.

    `disk:DIRECTORY?bytes=50GB` is a `DiskTier`; `disk:` may be left out if the path has a slash. Further options are
    `threads`, `direct`, `read_only` and `timeout`. `node:` or `node:NAME` is a `NodeTier`: memory that `kvpool node` owns;
    its options are `engine` and `timeout`. `redis://…` and `rediss://…` are a `RedisTier`, `s3://…` is an `S3Tier`,
    `mooncake://…` a `MooncakeTier`: see these classes for their options. Any address may have `compress=zstd`, `lz4` or
    `fp8`, and `dtype=` with the type of keys and values (bfloat16). Then it is a `CompressedTier` over that tier.
    `register_tier` and packages with an entry point `kvpool.tiers` add schemes.

    A wrong address raises `InvalidArgumentError` that names the wrong part. A missing package raises `ConfigError` that says
    what to install. A server that does not answer raises nothing: the tier says so in `stats().problem`, finds nothing, and
    works as soon as the server answers.
    """
    if not isinstance(address, (str, os.PathLike)):
        raise InvalidArgumentError(f"the address of a tier is a string, got {show(address)}")
    text, compression = _divided(os.fspath(address))
    if compression:
        codec = make_codec(compression.get("compress", ""), compression.get("dtype", CompressionOptions.dtype))
        return CompressedTier(open_tier(text), codec)
    scheme, divider, _ = text.partition(":")
    if divider and (opener := opener_of(scheme)) is not None:
        return opener(text)
    if "://" not in text and os.sep in text.partition("?")[0]:
        return _open_disk(text)
    named = f"begins with {show(scheme)}" if divider else "has no scheme, and no slash of a path"
    raise InvalidArgumentError(f"the address of a tier begins with one of {schemes()}; this one {named}")


def _divided(address: str) -> tuple[str, dict[str, str]]:
    """Splits an address into the address without the options of compression, and these options."""
    start, _, query = address.partition("?")
    options = [part.partition("=") for part in query.split("&") if part]
    ours = {name: value for name, _, value in options if name in option_kinds(CompressionOptions)}
    left = "&".join("".join(option) for option in options if option[0] not in ours)
    return (f"{start}?{left}" if left else start) if ours else address, ours


def _open_disk(address: str) -> DiskTier:
    url = TierURL.local(address)
    options = DiskOptions(**read_options(DiskOptions, url))
    if not options.bytes:
        raise InvalidArgumentError(f"{url.shown} needs the room that it may take, such as {url.shown}?bytes=50GB")
    return DiskTier(
        Path(url.path).expanduser(),
        options.bytes,
        io_threads=options.threads,
        direct=options.direct,
        read_only=options.read_only,
        timeout=options.timeout,
    )


_OPENERS: dict[str, Opener] = {
    "disk": _open_disk,
    "node": NodeTier,
    "redis": RedisTier,
    "rediss": RedisTier,
    "s3": S3Tier,
    "mooncake": MooncakeTier,
}
