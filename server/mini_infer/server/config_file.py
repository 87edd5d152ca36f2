"""The server's TOML file, checked key by key. Knows its shape and types; decides no precedence and no defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mini_infer.engines.api import Sampling
from mini_infer.engines.errors import InvalidRequest
from mini_infer.server.convert_request import check_sampling
from mini_infer.server.options import OPTIONS, ConfigError, Option

_SERVER = {option.name: option for option in OPTIONS}
_MODEL = {option.name: option for option in OPTIONS if option.of_model}
_SOURCE = Option(name="source", help="folder, .gguf file or hub id")
_ENGINE = {"kind": _SERVER["engine"], "devices": _SERVER["devices"]}
_WHOLE_NUMBERS = {"top_k": 2**32 - 1, "seed": 2**64 - 1}  # and their highest value, as on the wire
_SAMPLING_NAMES = [each.name for each in fields(Sampling) if each.name != "logit_bias"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """What the file says of one model."""

    source: str
    settings: dict[str, Any]
    sampling: Sampling
    engines: tuple[dict[str, Any], ...]  # "kind" and "devices" of each, where they are said


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """What the file says; an empty one says nothing."""

    server: dict[str, Any] = field(default_factory=dict)
    models: dict[str, ModelTable] = field(default_factory=dict)


def read_file(path: Path) -> File:
    """Reads and checks the file. Raises `ConfigError` with the file's name and the key."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, of Unicode, of a number with thousands of digits
        raise ConfigError(f"{path}: not TOML: {error}") from None
    _require_known(content, ("server", "models"), f"{path}:")
    models = _table(content.get("models", {}), f"{path}: models")
    return File(
        server=_settings(_table(content.get("server", {}), f"{path}: [server]"), _SERVER, f"{path}: [server]"),
        models={name: _model(table, f'{path}: [models."{name}"]') for name, table in models.items()},
    )


def _model(value: object, where: str) -> ModelTable:
    table = dict(_table(value, where))
    if "model" in table:
        raise ConfigError(f"{where} unknown key 'model': the model to load is named by source")
    _require_known(table, ("source", "sampling", "engines", *_MODEL), where)
    source = _SOURCE.from_file(table.pop("source", None), f"{where} source")
    sampling = _sampling(_table(table.pop("sampling", {}), f"{where} sampling"), f"{where} sampling")
    engines = table.pop("engines", [])
    if not isinstance(engines, list):
        raise ConfigError(f"{where} engines must be a list of tables")
    return ModelTable(
        source=source,
        sampling=sampling,
        engines=tuple(_settings(_table(each, f"{where} engines"), _ENGINE, f"{where} engines") for each in engines),
        settings=_settings(table, _MODEL, where),
    )


def _settings(table: Mapping[str, object], options: Mapping[str, Option], where: str) -> dict[str, Any]:
    _require_known(table, tuple(options), where)
    return {name: options[name].from_file(value, f"{where} {name}") for name, value in table.items()}


def _sampling(table: Mapping[str, Any], where: str) -> Sampling:
    _require_known(table, _SAMPLING_NAMES, where)
    for name, value in table.items():
        is_whole = name in _WHOLE_NUMBERS
        if type(value) is not int and (is_whole or type(value) is not float):
            raise ConfigError(f"{where} {name} must be a {'whole ' if is_whole else ''}number, not {value!r}")
        if is_whole and not 0 <= value <= _WHOLE_NUMBERS[name]:
            raise ConfigError(f"{where} {name} must be from 0 to {_WHOLE_NUMBERS[name]}, not {value!r}")
    sampling = Sampling(**table)
    try:
        check_sampling(sampling)
    except OverflowError:
        raise ConfigError(f"{where} holds a number that is too large") from None
    except InvalidRequest as error:
        raise ConfigError(f"{where} {error.field.removeprefix('sampling.')} {error.message}") from None
    return sampling


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a table, not {value!r}")
    return value


def _require_known(table: Mapping[str, object], known: list[str] | tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where} unknown key {key!r}; known are {', '.join(known)}")
