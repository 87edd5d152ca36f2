"""What this process is: versions, limits and when it started. Imports none of the libraries that it names."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import metadata

from mini_infer.server.convert_request import MAX_PROMPT_BYTES

MAX_MESSAGE_BYTES = 16 << 20
"""Of one gRPC message, either way."""

LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate", "grpcio", "protobuf")


def version() -> str:
    """Version of mini-infer; "unknown" in a source tree that is not installed."""
    return _version_of("mini-infer") or "unknown"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that make and carry the tokens, by package name; those that are installed."""
    return {name: found for name in LIBRARIES if (found := _version_of(name))}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What `GetServerInfo` tells."""

    version: str = field(default_factory=version)
    library_versions: dict[str, str] = field(default_factory=library_versions)
    start_wall_ns: int = field(default_factory=time.time_ns)
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_prompt_bytes: int = MAX_PROMPT_BYTES


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
