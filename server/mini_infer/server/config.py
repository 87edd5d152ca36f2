"""The configuration of a server process, from flags, environment and file. The only reader of any of the three.

A setting is looked for in this order: flag, environment, the model's table in the file, the file's [server] table,
default. The file::

    [server]                      # any option
    port = 50051
    [models."smollm2"]            # one table per served model, in place of the option `model`
    source = "default"
    max_queue = 64
    sampling = { temperature = 0.7 }
    [[models."smollm2".engines]]  # in place of the options `engine` and `devices`
    kind = "generate"
    devices = ["cuda:0", "cuda:1"]
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_infer.engines.api import Sampling
from mini_infer.engines.config import DEFAULT_MODEL, EngineConfig, canonical_label
from mini_infer.engines.errors import LoadError
from mini_infer.server import cli
from mini_infer.server.config_file import File, read_file
from mini_infer.server.options import ENV_PREFIX, OPTIONS, ConfigError
from mini_infer.server.pool import PoolConfig

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
CLIENT_VARIABLE = "MINI_INFER_ADDRESS"  # the one that is not the server's
MAX_SPAN_S = 24 * 3600.0
_DEFAULTS = {option.name: option.default for option in OPTIONS}
_SERVED_HERE = ("auto", "single", "generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """Engines of one kind, one on each device; no devices means that the server chooses."""

    kind: str = "auto"
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _SERVED_HERE:
            raise ConfigError(f"engine {self.kind!r} is not in this version; use {', '.join(_SERVED_HERE)}")
        if self.kind == "single" and len(self.devices) > 1:
            raise ConfigError(f"engine single takes one device, not {', '.join(self.devices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One served model."""

    pool: PoolConfig
    engine: EngineConfig  # of all its engines, but for their devices
    groups: tuple[EngineGroup, ...] = (EngineGroup(),)

    def __post_init__(self) -> None:
        labels = [label for group in self.groups for label in group.devices]
        devices = [canonical_label(label) for label in labels]
        for label, device in zip(labels, devices, strict=True):
            if devices.count(device) > 1:
                hint = "; on a CPU, cpu and cpu:1 make two engines" if device.startswith("cpu") else ""
                raise ConfigError(f"devices: {label!r} is named twice; every engine has a device of its own{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All that a server process needs to know. Raises `ConfigError` on creation for an invalid value."""

    models: tuple[ModelConfig, ...]
    host: str
    port: int
    grace_s: float
    propagation_s: float
    stall_timeout_s: float
    log_level: str

    def __post_init__(self) -> None:
        _require(bool(self.host), "host must not be empty")
        _require(0 <= self.port <= 65535, f"port must be from 0 to 65535, not {self.port}")
        for name in ("grace_s", "propagation_s", "stall_timeout_s"):
            span_s = getattr(self, name)
            _require(
                0 <= span_s <= MAX_SPAN_S, f"{name.removesuffix('_s')} must be from 0 to {MAX_SPAN_S:g}, not {span_s:g}"
            )
        _require(self.stall_timeout_s > 0, "stall_timeout must be above 0")


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """The configuration of this process. Raises `ConfigError`; `SystemExit` after --help and --version."""
    path, flags = cli.parse(argv)
    path = path or environ.get(f"{ENV_PREFIX}CONFIG")
    file = read_file(Path(path)) if path else File()
    layers = flags, _from_environment(environ)
    settings = ChainMap(*layers, file.server, _DEFAULTS)
    try:
        return ServerConfig(
            models=_models(layers, file),
            host=settings["host"],
            port=settings["port"],
            grace_s=settings["grace"],
            propagation_s=settings["propagation"],
            stall_timeout_s=settings["stall_timeout"],
            log_level=settings["log_level"],
        )
    except LoadError as error:
        raise ConfigError(error.message) from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the environment; an empty variable says nothing, as compose files and shells leave them."""
    environ = {name: value for name, value in environ.items() if not _is_service_link(name, value)}
    known = {f"{ENV_PREFIX}CONFIG", CLIENT_VARIABLE, *(option.variable for option in OPTIONS)}
    unknown = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
    if unknown:
        raise ConfigError(f"the environment sets {unknown[0]!r}, which is no setting; see {cli.PROGRAM} --help")
    return {
        option.name: option.from_text(text, option.variable)
        for option in OPTIONS
        if (text := environ.get(option.variable))
    }


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set it, as it does in every pod beside a Service that is called mini-infer."""
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and "://" in value)


def _models(layers: tuple[dict[str, Any], ...], file: File) -> tuple[ModelConfig, ...]:
    if not file.models:
        settings = ChainMap(*layers, file.server, _DEFAULTS)
        name = settings["served_model_name"] or _name_of(settings["model"])
        return (_model(name, settings["model"], settings, Sampling(), (_group(settings),)),)
    for name in ("model", "served_model_name"):
        if any(name in layer for layer in (*layers, file.server)):
            raise ConfigError(f"{name} cannot be set beside the file's [models] tables, which name their models")
    models = []
    for name, table in file.models.items():
        settings = ChainMap(*layers, table.settings, file.server, _DEFAULTS)
        groups = _groups(layers, table.engines, settings)
        models.append(_model(name, table.source, settings, table.sampling, groups))
    return tuple(models)


def _groups(
    layers: tuple[dict[str, Any], ...], engines: tuple[dict[str, Any], ...], settings: Mapping[str, Any]
) -> tuple[EngineGroup, ...]:
    if not engines or any(name in layer for layer in layers for name in ("engine", "devices")):
        return (_group(settings),)
    return tuple(EngineGroup(kind=each.get("kind", "auto"), devices=each.get("devices", ())) for each in engines)


def _group(settings: Mapping[str, Any]) -> EngineGroup:
    return EngineGroup(kind=settings["engine"], devices=settings["devices"])


def _model(
    name: str, source: str, settings: Mapping[str, Any], sampling: Sampling, groups: tuple[EngineGroup, ...]
) -> ModelConfig:
    return ModelConfig(
        pool=PoolConfig(model=name, policy=settings["policy"], knee=settings["knee"], max_queue=settings["max_queue"]),
        engine=EngineConfig(
            model=source,
            revision=settings["revision"],
            load_format=settings["load_format"],
            dtype=settings["dtype"],
            max_context=settings["max_context"],
            num_threads=settings["threads"],
            chat_template=settings["chat_template"],
            trust_remote_code=settings["trust_remote_code"],
            cache_dir=settings["cache_dir"],
            default_sampling=sampling,
            max_running=settings["max_running"],
            cache_tokens=settings["cache_tokens"],
            prefill_tokens=settings["prefill_tokens"],
            prefix_cache=settings["prefix_cache"],
        ),
        groups=groups,
    )


def _name_of(model: str) -> str:
    return DEFAULT_MODEL_NAME if model == DEFAULT_MODEL else Path(model).expanduser().resolve().name


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
