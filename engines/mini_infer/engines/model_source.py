"""Where a model's files are: a folder, a GGUF file, or a snapshot of a hub repository. Reads none of them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mini_infer.engines.errors import LoadError

_log = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.safetensors", "*.tiktoken", "*.txt")
_NOT_FILES = ("*/*", "consolidated*")  # other formats of the same weights


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of files and, for GGUF, the one file in it that matters."""

    folder: Path
    gguf_file: str | None = None


def find_source(model: str, revision: str | None = None) -> Source:
    """Finds a model's files, fetching them from the hub where ``model`` is an id and not a path.

    Raises `LoadError` where there is nothing of that name.
    """
    path = Path(model).expanduser()
    if path.exists() and revision is not None:
        raise LoadError(f"revision {revision} is for hub ids, and {model} is here on disk")
    if path.is_dir():
        return Source(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{model} is a file, but not a .gguf file: name the folder of the model")
        return Source(path.parent, path.name)
    if not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        raise LoadError(f"{model} is neither a folder, a .gguf file nor a hub id")
    return Source(_fetch(model, revision))


def _fetch(hub_id: str, revision: str | None) -> Path:
    where = f"{hub_id} at revision {revision}" if revision else hub_id
    _log.info("looking for %s on the hub", where)
    try:
        folder = _snapshot(hub_id, revision, _FILES)
        if not any(folder.glob("*.safetensors")):
            folder = _snapshot(hub_id, revision, (*_FILES, "*.bin"))
    except GatedRepoError as error:
        raise LoadError(
            f"{where} on the hub asks for an account that may read it: log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise LoadError(f"{where} is not on the hub: there is no such revision") from error
    except RepositoryNotFoundError as error:
        raise LoadError(f"{where} is not on the hub, and there is no folder of that name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise LoadError(
            f"no folder is called {hub_id}, and {where} could not be fetched from the hub: {_first_sentence(error)}"
        ) from error
    return folder


def _first_sentence(error: Exception) -> str:
    """The rest of what the hub's library says is advice, sometimes for pages."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.removeprefix("Got: ").partition(". ")[0]


def _snapshot(hub_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    return Path(
        snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_NOT_FILES))
    )
