"""``--model``: a folder, a model's id on the hub, or ``demo``, the model that ships in the package."""

from __future__ import annotations

import re
from pathlib import Path

import epmoe
from placement.errors import UserError

DEMO = "demo"
DEMO_FOLDER = Path(epmoe.__file__).parent / "demo_model"
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
TIMEOUT_S = 5.0


def resolve_model(name: str) -> Path:
    """The checkpoint's folder; a hub id is taken from the local cache or downloaded."""
    if name == DEMO:
        return DEMO_FOLDER
    if not name:
        raise UserError(f"the model's name is empty; give a folder, a hub id OWNER/NAME, or {DEMO}")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise UserError(f"model folder {name} does not exist; give a folder, a hub id OWNER/NAME, or {DEMO}")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        raise UserError(f"model {name} is neither a folder nor a hub id OWNER/NAME") from None
    try:
        HfApi().model_info(name, timeout=TIMEOUT_S)  # a quick look first: a download retries for minutes
        return Path(snapshot_download(name, allow_patterns=FILES))
    except RepositoryNotFoundError:
        raise UserError(f"model {name} is no folder here and not on the hub; check the name or your token") from None
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model {name} is no folder here, and the hub cannot be reached ({reason}); give a downloaded folder"
        ) from None
