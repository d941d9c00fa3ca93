"""The checkpoint's tokenizer, and prompts that the engine can take."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from epmoe.config import EngineConfig
from epmoe.model_config import ModelConfig
from launch.prompts import Prompt
from placement.errors import UserError

MOST_REASON = 200  # characters of another library's message


def load_tokenizer(folder: str) -> Any:
    """The checkpoint's own tokenizer; the import takes seconds, so it comes while the ranks start."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # its files are read by several libraries, which raise what their parsers happen to
        reason = " ".join(str(error).split())[:MOST_REASON] or type(error).__name__
        if isinstance(error, (KeyError, TypeError, AttributeError)):
            reason = f"{type(error).__name__} {reason} while reading its files"
        raise UserError(f"cannot load the tokenizer of {folder}: {reason}; put its files beside the weights") from None


def tokenizer_sha256(folder: str) -> str:
    """Hash of ``tokenizer.json``, which traces carry beside token ids; empty without that file."""
    path = Path(folder) / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def encode(prompt: Prompt, tokenizer: Any, engine: EngineConfig, model: ModelConfig) -> list[int]:
    """The prompt's token ids; ``UserError`` if the engine cannot run them."""
    if prompt.text is not None and not _is_unicode(prompt.text):
        raise UserError(f"{prompt.where}: the prompt holds half a surrogate pair or undecoded bytes; give Unicode text")
    ids = list(prompt.token_ids) if prompt.token_ids is not None else tokenizer(prompt.text, verbose=False).input_ids
    if not ids:
        raise UserError(f"{prompt.where}: the prompt has no token; give at least one")
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        bad = next(i for i in ids if not 0 <= i < model.vocab_size)
        raise UserError(f"{prompt.where}: token id {bad} is outside the vocabulary of {model.vocab_size}")
    if len(ids) >= engine.max_model_len:
        raise UserError(
            f"{prompt.where}: the prompt has {len(ids)} tokens, and max_model_len {engine.max_model_len} must hold them"
            " and one more; shorten it or raise max_model_len"
        )
    return ids


def _is_unicode(text: str) -> bool:
    """JSON's escapes and undecodable bytes on a command line can make a ``str`` that is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
