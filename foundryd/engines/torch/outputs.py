# SPDX-License-Identifier: Apache-2.0
"""What a captured function returned, as an archive holds it, and as tensors again.

Tensors are views of storages: two outputs that shared a storage share one again, and every view keeps its shape,
strides and offset.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from foundryd.errors import ArchiveFormatError, CaptureError


def encode(outputs: Any, device: torch.device) -> dict[str, Any]:
    """Describes nested outputs on ``device``; raises ``CaptureError`` for a leaf that cannot be made again."""
    leaves, structure = pytree.tree_flatten(outputs, is_leaf=_named_result)
    storages: dict[int, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            described.append(_encode_tensor(leaf, storages, device))
        elif _named_result(leaf):
            parts = [_encode_tensor(part, storages, device) for part in leaf]
            described.append({"result": type(leaf).__name__, "parts": parts})
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            described.append(leaf)
        else:
            raise CaptureError(
                f"a captured function returned a {type(leaf).__name__}, which an archive cannot hold: return tensors, "
                "numbers, text, or nests of them"
            )
    try:
        text = pytree.treespec_dumps(structure)
    except NotImplementedError as error:
        raise CaptureError(
            f"a captured function returned a container that cannot be described ({error}): register it with "
            "torch.utils._pytree and a serialized_type_name, or return tuples, lists and dicts"
        ) from error
    return {"tree": text, "leaves": described, "storages": [[a, n] for a, n in storages.items()]}


def _named_result(value: Any) -> bool:
    """Whether this is what an operation with several results returns, as ``torch.max`` does."""
    return type(value).__module__ == "torch.return_types"


def _encode_tensor(tensor: torch.Tensor, storages: dict[int, int], device: torch.device) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise CaptureError(
            f"a captured function returned a tensor of layout {tensor.layout} (or a conjugate view): "
            "return plain strided tensors"
        )
    if tensor.numel() and tensor.device != device:
        raise CaptureError(
            f"a captured function returned a tensor on {tensor.device} and its graph runs on {device}: the value is no "
            "part of the graph, so keep it outside"
        )
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    storages[address] = max(size, storages.get(address, 0))
    return {
        "storage": address,
        "offset": tensor.storage_offset(),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def decode(described: dict[str, Any], device: torch.device) -> Any:
    """The outputs again, as tensors on ``device``; raises ``ArchiveFormatError`` for what no ``encode`` makes."""
    try:
        storages = {address: storage_at(address, size, device) for address, size in described["storages"]}
        leaves = [
            _decode_leaf(leaf, storages, device) if isinstance(leaf, dict) else leaf for leaf in described["leaves"]
        ]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(described["tree"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ArchiveFormatError(
            f"the outputs of a graph are described in a way that no writer uses ({error}): capture again"
        ) from error


def storage_at(address: int, size: int, device: torch.device) -> Any:
    """A storage of ``size`` bytes over memory that somebody else owns."""
    if address == 0:
        return torch.UntypedStorage(0, device=device)
    return torch._C._construct_storage_from_data_pointer(address, device, size)


def _decode_leaf(leaf: dict[str, Any], storages: dict[int, Any], device: torch.device) -> Any:
    if "result" in leaf:
        return getattr(torch.return_types, leaf["result"])(
            [_decode_tensor(part, storages, device) for part in leaf["parts"]]
        )
    return _decode_tensor(leaf, storages, device)


def _decode_tensor(leaf: dict[str, Any], storages: dict[int, Any], device: torch.device) -> torch.Tensor:
    tensor = torch.empty(0, dtype=getattr(torch, leaf["dtype"]), device=device)
    return tensor.set_(storages[leaf["storage"]], leaf["offset"], leaf["shape"], leaf["stride"])
