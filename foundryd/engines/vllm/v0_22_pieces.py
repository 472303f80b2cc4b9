# SPDX-License-Identifier: Apache-2.0
"""Graphs that vLLM 0.22.1 keeps in wrappers: of pieces of a model, and in the V1 runner of whole models.

vLLM compiles the model in pieces, which its attention runs between, and wraps each in a ``CUDAGraphWrapper``, which
holds a graph and its outputs for each number of tokens.  Outputs of one piece are inputs of the next, so a restored
wrapper returns tensors at the addresses that were captured, and nothing else about a forward pass changes.  The V1
runner also wraps the model itself, with a graph and hidden states for each batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from foundryd.engines.vllm import seam
from foundryd.engines.vllm.seam import Seam
from foundryd.errors import CaptureError, EngineUnsupported

# Of a graph: see ``key_of`` and ``key_of_whole``.  The last number is there for a batch with adapters only.
Key = tuple[str, int, int, int] | tuple[str, int, int, int, int]
Capture = Callable[[Key, Callable[[], Any]], tuple[Any, Any]]

_MODULE = "vllm.compilation.cuda_graph"

# What vLLM calls models that draft where it compiles them.
_DRAFTING = frozenset({"eagle_head", "draft_model"})


def key_of(index: int, tokens: int, adapters: int = 0, drafts: bool = False) -> Key:
    """The stable name of a piece's graph: where the piece is in the model, and for how many tokens.

    A batch with adapters has a graph of its own, whose name ends with how many it may have.  ``drafts`` says that the
    piece is of the model that drafts.
    """
    kind = "DRAFT" if drafts else "PIECE"
    return (kind, index, tokens, 0, adapters) if adapters else (kind, index, tokens, 0)


def key_of_whole(batch: Any) -> Key:
    """The stable name of a graph of the whole model: tokens, requests, and tokens of each request; 0 is any number.

    It ends like that of a piece.
    """
    tokens, requests, adapters = int(batch.num_tokens), int(batch.num_reqs), int(batch.num_active_loras)
    each = tokens // requests if batch.uniform else 0
    return ("FULL", tokens, requests, each, adapters) if adapters else ("FULL", tokens, requests, each)


def tokens_of(key: Key) -> int:
    """For how many tokens the graph of that name is."""
    return key[1] if key[0] == "FULL" else key[2]


def wrappers(modes: Any, drafts: bool = False) -> dict[int, Any]:
    """vLLM's wrappers of pieces by the pieces' places in the model; raises ``EngineUnsupported``.

    They are of the model that answers, or of that which drafts.
    """
    found: dict[int, Any] = {}
    for wrapper in list(importlib.import_module(_MODULE).CUDAGraphWrapper._all_instances):
        if wrapper.runtime_mode is not modes.PIECEWISE or _drafts(wrapper) is not drafts:
            continue
        index = getattr(wrapper.runnable, "piecewise_compile_index", None)
        if index is None or index in found:
            what = "a piece without a place in the model" if index is None else f"two pieces at place {index}"
            raise EngineUnsupported(
                f"vLLM has {what}, so its graphs cannot be told apart: compile one model, without "
                "use_inductor_graph_partition, or choose cudagraph_mode FULL_DECODE_ONLY"
            )
        found[int(index)] = wrapper
    if not found:
        raise EngineUnsupported(
            f"vLLM has no pieces of the model{' that drafts' * drafts} to capture, though its cudagraph_mode asks for "
            "them: choose FULL_DECODE_ONLY"
        )
    return dict(sorted(found.items()))


def _drafts(wrapper: Any) -> bool:
    """Whether a piece is of the model that drafts, which vLLM compiles under a name of its own."""
    return getattr(getattr(wrapper.runnable, "vllm_backend", None), "prefix", "") in _DRAFTING


@contextmanager
def recording(capture: Capture) -> Iterator[None]:
    """Inside, each piece or model that vLLM's wrappers would capture is captured by ``capture``.

    The wrapper is only in place for that long: a served request calls vLLM's own function for every piece.
    """

    def around(real: Callable[..., Any], wrapper: Any, *arguments: Any, **named: Any) -> Any:
        context = importlib.import_module("vllm.forward_context").get_forward_context()
        if context.cudagraph_runtime_mode is not wrapper.runtime_mode:
            return real(wrapper, *arguments, **named)
        return _record(wrapper, context.batch_descriptor, capture, arguments, named)

    seams = [Seam(_MODULE, "CUDAGraphWrapper", "__call__", ("self",), around)]
    seam.install(seams)
    try:
        yield
    finally:
        seam.remove(seams)


def _record(wrapper: Any, batch: Any, capture: Capture, arguments: Any, named: Any) -> Any:
    module = importlib.import_module(_MODULE)
    outputs: list[Any] = []

    def fn() -> Any:
        output = wrapper.runnable(*arguments, **named)
        # What the last piece returns nobody else's graph reads, so its memory may be another graph's.
        outputs.append(module.weak_ref_tensors(output) if wrapper.cudagraph_options.weak_ref_output else output)
        return {"output": module.weak_ref_tensors(output), "inputs": inputs}

    # Where vLLM logs for debugging, it compares these with each replay's.
    inputs = [argument.data_ptr() for argument in arguments if hasattr(argument, "data_ptr")]
    graph, kept = capture(_key_in(wrapper, batch), fn)
    enter(wrapper, batch, graph, kept)
    # The next piece reads it under capture: it must be in use until then.
    return outputs.pop()


def _key_in(wrapper: Any, batch: Any) -> Key:
    if wrapper.runtime_mode.name == "FULL":
        return key_of_whole(batch)
    place = int(wrapper.runnable.piecewise_compile_index)
    return key_of(place, batch.num_tokens, batch.num_active_loras, _drafts(wrapper))


def require(wanted: Sequence[Key], captured: Sequence[Key]) -> None:
    """Raises ``CaptureError`` if vLLM captured one of the graphs past the recording."""
    if missing := sorted(set(wanted) - set(captured)):
        raise CaptureError(
            f"vLLM captured {len(missing)} of {len(wanted)} graphs by itself, {missing[0]} for one, so an archive "
            "would lack them: choose cudagraph_mode FULL_DECODE_ONLY"
        )


def give(wrapper: Any, tokens: int, has_lora: bool, graph: Any, kept: Any) -> None:
    """Lets a piece's wrapper have a restored graph for so many tokens; ``kept`` is what was recorded with it."""
    batch = importlib.import_module("vllm.forward_context").BatchDescriptor(num_tokens=tokens, has_lora=has_lora)
    enter(wrapper, batch, graph, kept)


def enter(wrapper: Any, batch: Any, graph: Any, kept: Any) -> None:
    """Lets a wrapper have the graph of a batch; ``kept`` is what was recorded with it."""
    entry = importlib.import_module(_MODULE).CUDAGraphEntry
    wrapper.concrete_cudagraph_entries[batch] = entry(
        batch_descriptor=batch, cudagraph=graph, output=kept["output"], input_addresses=list(kept["inputs"])
    )
