"""Settings of `kvpool serve` in a TOML file: where it listens, who may ask, how much, and which models it serves.

    [server]
    port = 8000
    keys = "keys.txt"

    [[models]]
    name = "small"
    model = "models/small"
    memory = "2GiB"

Options of the command override the file. `[tiers]` of the same file is for all models: docs/tiers.md.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.checks import check_int, show
from kvpool.engine.options import SHOWN, EngineOptions
from kvpool.engine.options import limits as engine_limits
from kvpool.engine.settings import EngineSettings
from kvpool.errors import ConfigError
from kvpool.fields import checked, kinds_of, options_of, setting, settings_of
from kvpool.scheduling import SchedulerConfig
from kvpool.server.auth import ENVIRONMENT
from kvpool.server.images import image_places
from kvpool.server.limits import Limits
from kvpool.server.tool_forms import check_tool_parser
from kvpool.tiers.settings import read_toml

if TYPE_CHECKING:
    from kvpool.engine.engine import Engine

LOG_LEVELS = ("debug", "info", "warning", "error")
CPU_PROMPT_TOKENS = 256  # prompt tokens of one step on a CPU, besides one token for each sequence


@dataclass(frozen=True)
class ModelSettings:
    """A model and what clients call it; `options` make its engine. `tool_parser` is as of `ServedModel`."""

    name: str
    options: EngineOptions
    host_memory: str | None
    max_sequences: int
    max_model_len: int | None = None
    chat_template: str | None = None
    tool_parser: str = ""
    keep_varying_lines: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    max_adapters: int = 16
    language_adapters: bool = False

    def __post_init__(self) -> None:
        for name, path in self.adapters.items():
            if not isinstance(path, str) or not (Path(path).expanduser() / "adapter_config.json").is_file():
                raise ConfigError(f"adapter {name!r}: {show(path)} is no directory with an adapter_config.json")
        check_tool_parser(self.tool_parser)
        check_int(self.max_sequences, "max_sequences", 1, 2**31)
        check_int(1 if self.max_model_len is None else self.max_model_len, "max_model_len", 1, 2**31)
        self._template()

    def make_engine(self) -> Engine:
        """Makes the engine of this model."""
        scheduler = step_limits(self.options.device, self.max_sequences)
        cache: dict[str, Any] = {"remembered_blocks": None}
        if self.max_model_len is not None:
            cache["max_seq_len"] = self.max_model_len
        adapters = {name: Path(path).expanduser() for name, path in self.adapters.items()}
        engine = self.options.make_engine(
            host_memory=self.host_memory,
            scheduler=scheduler,
            cache=cache,
            adapters=adapters or None,
            max_adapters=self.max_adapters,
            language_adapters=self.language_adapters,
        )
        if (template := self._template()) is not None and engine.tokenizer is not None:
            engine.tokenizer.chat_template = template
            if engine.processor is not None:
                engine.processor.chat_template = template
        return engine

    def placed(self, publish: str, place: str) -> ModelSettings:
        """The same for one of several engines: it publishes there, and has a directory of this name in that of the disk."""
        options = self.options.changed(publish=publish)
        if (disk := options.tiers(self.host_memory).disk) is not None:
            options = options.changed(disk=str(Path(disk) / place))
        return replace(self, options=options)

    def _template(self) -> str | None:
        """The text of the chat template that takes the place of the model's own."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template {self.chat_template} cannot be read: {error}") from None


@dataclass(frozen=True)
class ServeSettings:
    """Everything but the models."""

    host: str = setting(
        "127.0.0.1", "The address to listen at (default 127.0.0.1). Others than this machine's own need keys."
    )
    port: int = setting(8000, "8000; 0 takes a free one.", int, low=0, high=65535)
    keys: Path | None = setting(
        None, f"Who may ask: a line 'TENANT SHA256 [admin]' each. Also ${ENVIRONMENT}: TENANT:KEY[:admin],...", Path
    )
    share_cache: bool = setting(False, "Let tenants reuse each other's prefixes; their timing tells.", bool)
    insecure: bool = setting(False, "Listen at any address, under any name, without keys.", bool)
    traces: str | None = setting(
        None, "Send a span of each request to this OpenTelemetry collector: http://HOST:4318/v1/traces."
    )
    max_sequences: int = setting(256, "Sequences in one step (default 256).", int, low=1)
    max_model_len: int | None = setting(
        None, "Tokens of a prompt and its answer (default: what the model can).", int, low=1
    )
    chat_template: str | None = setting(None, "A file with a chat template that takes the place of the model's own.")
    tool_parser: str = setting(
        "", "How the model writes calls of tools, where its chat template does not tell: docs/server.md."
    )
    keep_varying_lines: bool = setting(
        False, "Leave lines in prompts that differ for nothing, such as Claude Code's billing header.", bool
    )
    allow_origins: Sequence[str] = setting(
        (),
        "A site whose pages may ask this server (CORS), such as https://chat.example; * for all.",
        list,
        flag="--allow-origin",
    )
    tls_cert: str | None = setting(None, "A certificate, to serve https.")
    tls_key: str | None = setting(None, "Its private key.")
    log_level: str = setting("warning", "debug, info, warning (default), error.")
    image_hosts: Sequence[str] = setting(
        (),
        "A host that images in messages may be fetched from, at ports 80 and 443 or as HOST:PORT.",
        list,
        flag="--image-host",
    )
    limits: Limits = Limits()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        if wrong := [host for host in self.image_hosts if not isinstance(host, str)]:
            raise ConfigError(f"image_hosts are names of hosts, got {show(wrong[0])}")
        image_places(self.image_hosts)
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level={show(self.log_level)} is unknown; known: {', '.join(LOG_LEVELS)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both: tls_cert, a certificate, and tls_key, its private key")
        for file in (self.tls_cert, self.tls_key):
            if file is not None and not Path(file).is_file():
                raise ConfigError(f"there is no file {file} for TLS")
        if self.tls_cert is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
            except OSError as error:
                raise ConfigError(f"{self.tls_cert} with {self.tls_key} is no certificate for TLS: {error}") from None

    @property
    def of_each_model(self) -> dict[str, Any]:
        """What holds for a model that says nothing else."""
        return {name: getattr(self, name) for name in _OF_EACH_MODEL}


ServerOptions: Any = options_of(Limits, "ServerOptions", bases=(options_of(ServeSettings, "_ServeOptions"),))
# What a server may say for all of its models, and a model for itself.
_OF_EACH_MODEL = ("max_sequences", "max_model_len", "chat_template", "tool_parser", "keep_varying_lines")
_SERVER_KINDS = kinds_of(ServeSettings) | kinds_of(Limits)
# The keys of a model in a file, and the fields of `EngineOptions` that they set.
_OF_ENGINE = {"model": "model"} | {each.metadata["key"] or name: name for name, each in SHOWN.items()}
_MODEL_KINDS: dict[str, type] = {
    **{"name": str, "model": str, "host_memory": str, "adapters": dict, "max_adapters": int},
    "language_adapters": bool,
    **{name: _SERVER_KINDS[name] for name in _OF_EACH_MODEL},
    **kinds_of(EngineSettings),
}


def read_serve(
    options: EngineOptions,
    host_memory: str | None,
    name: str | None,
    given: Mapping[str, Any],
    adapters: Sequence[str] = (),
) -> tuple[ServeSettings, list[ModelSettings]]:
    """The settings of a server and of its models. `given` are options of the command; None means not given.

    `--model` serves that model instead of those in the file. `adapters` of it are written NAME=PATH.
    """
    file = {} if options.config is None else read_toml(options.config)
    server = checked(file.get("server", {}), f"{options.config}: [server]", _SERVER_KINDS)
    server |= {option: value for option, value in given.items() if value is not None}
    limits = {each.name: server.pop(key) for key, each in settings_of(Limits).items() if key in server}
    if "requests" in limits:
        limits.setdefault("requests_per_key", limits["requests"])
    if "keys" in server:
        server["keys"] = Path(server["keys"])
    check_int(server.get("port", 0), "[server] port", 0, 65535)
    for key in ("allow_origins", "image_hosts"):
        server[key] = tuple(server.get(key, ()))
    settings = ServeSettings(**server, limits=Limits(**limits))
    options.check(host_memory)
    tables = file.get("models", [])
    if not isinstance(tables, list):
        raise ConfigError(f"{options.config}: write [[models]], once for each model")
    if options.model is not None or not tables:
        called = name or ("SmolLM2-135M-Instruct" if options.model is None else Path(options.model).resolve().name)
        model = ModelSettings(called, options, host_memory, **settings.of_each_model, adapters=_adapters(adapters))
        return settings, [model]
    if adapters:
        raise ConfigError(f"--adapter is for --model; write adapters = {{NAME = PATH}} for a model of {options.config}")
    if name is not None:
        raise ConfigError(f"--name is for --model; the models of {options.config} have names there")
    return settings, _models(tables, options, host_memory, settings)


def _adapters(given: Sequence[str]) -> dict[str, str]:
    """Adapters of the command line, by name."""
    found: dict[str, str] = {}
    for each in given:
        name, _, path = each.partition("=")
        if not name or not path:
            raise ConfigError(f"--adapter is written NAME=PATH, got {each!r}")
        if name in found:
            raise ConfigError(f"--adapter names {name!r} twice")
        found[name] = path
    return found


def step_limits(device: str | None, max_sequences: int) -> SchedulerConfig:
    """The limits of a step. On a CPU, time grows with every token, so large steps save nothing and delay streams."""
    from kvpool.model.loading import torch_device

    is_cpu = torch_device(device).type == "cpu"
    return engine_limits(max_sequences + CPU_PROMPT_TOKENS if is_cpu else None, max_sequences)


def _models(
    tables: list[Any], options: EngineOptions, host_memory: str | None, settings: ServeSettings
) -> list[ModelSettings]:
    """The models of a file. A disk tier belongs to one engine, so each model gets its own directory in that of `[tiers]`."""
    found: list[ModelSettings] = []
    shared_disk = options.tiers(host_memory).disk
    if options.record is not None and len(tables) > 1:
        raise ConfigError("--record writes one model's trace; set record in each of [[models]] instead")
    if options.publish is not None and len(tables) > 1:
        raise ConfigError("--publish announces one model's cache; set publish in each of [[models]] instead")
    for number, table in enumerate(tables, 1):
        where = f"{options.config}: model {number} of [[models]]"
        keys = checked(table, where, _MODEL_KINDS)
        if "name" not in keys or "model" not in keys:
            raise ConfigError(f"{where} needs name and model")
        if keys["name"] in {each.name for each in found}:
            raise ConfigError(f"{where} has the name {keys['name']!r} of one before it")
        own = {_OF_ENGINE[key]: value for key, value in keys.items() if key in _OF_ENGINE}
        if shared_disk is not None and len(tables) > 1:
            own.setdefault("disk", str(Path(shared_disk) / keys["name"]))
        engine = options.changed(**own)
        engine.check(host_memory)
        own_settings = {**settings.of_each_model}
        own_settings |= {
            key: keys[key] for key in (*_OF_EACH_MODEL, "adapters", "max_adapters", "language_adapters") if key in keys
        }
        host = keys.get("host_memory", host_memory)
        found.append(ModelSettings(keys["name"], engine, host, **own_settings))
    return found
