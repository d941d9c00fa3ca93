"""Opens ``.pt`` files; the only file here that may import torch, and only when it is called.

``weights_only=True``: tensors, numbers, strings and containers are read, nothing else is unpickled.
"""

from __future__ import annotations

from pathlib import Path

from placement.errors import UserError


def load_pt(path: str | Path) -> object:
    """The file's content with every tensor as a numpy array."""
    try:
        import torch
    except ImportError:
        raise UserError(f"{path} is a torch file and torch is not installed; install torch to read it") from None
    try:
        raw = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no pickle make the reader fail in any way
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cannot read {path} as a torch file of plain tensors ({reason}); is it whole, and written by the recorder?"
        ) from None
    return _to_numpy(raw, torch.Tensor)


def _to_numpy(value: object, tensor_type: type) -> object:
    if isinstance(value, tensor_type):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _to_numpy(item, tensor_type) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_numpy(item, tensor_type) for item in value]
    return value
