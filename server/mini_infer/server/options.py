"""Every setting of the server: its name, type, default and reason. One table for flags, environment and file.

One rule gives a setting its three names: ``max_queue`` in the file is ``--max-queue`` and ``MINI_INFER_MAX_QUEUE``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from mini_infer.engines.config import DEFAULT_MODEL, DTYPES, LOAD_FORMATS, SHAPES
from mini_infer.server.policy import POLICIES

ENV_PREFIX = "MINI_INFER_"
ENGINES = ("auto", "single", "replica", "pipeline", "generate")
LOG_LEVELS = ("debug", "info", "warning", "error")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class ConfigError(Exception):
    """The configuration is invalid. The message is one line that names the setting and where it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting. ``kind`` is str, int, float, bool or tuple, which is a list of strings, comma-separated in text."""

    name: str
    kind: type = str
    default: Any = None
    help: str
    choices: tuple[str, ...] = ()
    of_model: bool = False  # may also stand in the file's table of one model

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return ENV_PREFIX + self.name.upper()

    def from_text(self, text: str, where: str) -> Any:
        """Its value from a flag or a variable. Raises `ConfigError`."""
        try:
            value = _from_text(self.kind, text)
        except ValueError:
            raise ConfigError(f"{where} must be {_WORDS[self.kind]}, not {text!r}") from None
        return self._chosen(value, where)

    def from_file(self, value: object, where: str) -> Any:
        """Its value from TOML, where types are known. Raises `ConfigError`."""
        if self.kind is tuple and isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        if self.kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"{where} must be {_WORDS[self.kind]}, not {value!r}")
        return self._chosen(value, where)

    def _chosen(self, value: Any, where: str) -> Any:
        if isinstance(value, str) and not _is_plain(value):
            raise ConfigError(f"{where} must be UTF-8 without NUL, not {value!r}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{where} must be one of {', '.join(self.choices)}, not {value!r}")
        return value


def _is_plain(text: str) -> bool:
    """Whether the system takes it as a name and a message can carry it. Bytes that are not UTF-8 come as surrogates."""
    return "\0" not in text and text == text.encode("utf-8", "ignore").decode()


def _from_text(kind: type, text: str) -> Any:
    if kind is tuple:
        return tuple(part.strip() for part in text.split(","))
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(text)
        return text.lower() in _TRUE
    return kind(text)


_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
}

OPTIONS = (
    Option(
        name="model",
        default=DEFAULT_MODEL,
        help=f"folder, .gguf file or hub id; with load format dummy a shape: {', '.join(SHAPES)}",
    ),
    Option(name="served_model_name", help="name that requests use; default: the last part of the model"),
    Option(name="revision", help="branch, tag or commit of a hub id", of_model=True),
    Option(
        name="load_format", default="auto", choices=LOAD_FORMATS, help="dummy: random weights, no files", of_model=True
    ),
    Option(
        name="engine",
        default="auto",
        choices=ENGINES,
        help="single: batches streams on one device; generate: one stream at a time, any model; "
        "auto: batching on each device, where that is exact for the model, else generate; "
        "replica and pipeline are not in this version",
        of_model=True,
    ),
    Option(
        name="devices",
        kind=tuple,
        default=(),
        help="device labels, one engine each; default: the first CUDA device, else cpu",
        of_model=True,
    ),
    Option(
        name="dtype",
        default="auto",
        choices=DTYPES,
        help="auto: the model's own on CUDA, float32 on a CPU",
        of_model=True,
    ),
    Option(name="max_context", kind=int, help="tokens, prompt and answer; default: the model's limit", of_model=True),
    Option(
        name="max_running",
        kind=int,
        help="streams at once on one device, of engines that batch; default: 16 on a CPU, 256 on CUDA",
        of_model=True,
    ),
    Option(
        name="cache_tokens",
        kind=int,
        help="tokens that the key/value cache holds; default: what the memory allows",
        of_model=True,
    ),
    Option(
        name="prefill_tokens",
        kind=int,
        help="most prompt tokens in one step; default: 512 on a CPU, 2048 on CUDA",
        of_model=True,
    ),
    Option(
        name="prefix_cache",
        kind=bool,
        default=True,
        help="prompts with equal beginnings share what is cached of them",
        of_model=True,
    ),
    Option(name="chat_template", help="file to use in place of the model's own chat template", of_model=True),
    Option(
        name="trust_remote_code",
        kind=bool,
        default=False,
        help="run Python code that comes with the model",
        of_model=True,
    ),
    Option(name="threads", kind=int, help="CPU threads of torch; default: torch's own choice"),
    Option(name="cache_dir", help="folder for the unpacked default model; default: ~/.cache/mini-infer"),
    Option(
        name="policy",
        default="least_loaded",
        choices=POLICIES,
        help="which engine takes the next stream",
        of_model=True,
    ),
    Option(name="knee", kind=int, help="of policy pack: streams per engine before the next one is used", of_model=True),
    Option(name="max_queue", kind=int, default=256, help="streams that may wait, per model", of_model=True),
    Option(name="host", default="127.0.0.1", help="address to listen on, or unix:PATH"),
    Option(name="port", kind=int, default=50051, help="port to listen on; 0 takes a free one"),
    Option(name="grace", kind=float, default=30.0, help="seconds that running streams get at shutdown"),
    Option(
        name="propagation",
        kind=float,
        default=1.0,
        help="seconds between health turning off and newcomers being refused at shutdown",
    ),
    Option(
        name="stall_timeout", kind=float, default=600.0, help="seconds without progress that take an engine out of use"
    ),
    Option(name="log_level", default="info", choices=LOG_LEVELS, help="what is written to stderr"),
)
