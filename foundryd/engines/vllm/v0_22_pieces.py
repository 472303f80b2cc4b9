# SPDX-License-Identifier: Apache-2.0
"""Graphs of pieces of a model in vLLM 0.22.1, which its attention runs between.

vLLM compiles the model in pieces and wraps each in a ``CUDAGraphWrapper``, which holds a graph and its outputs for each
number of tokens.  Outputs of one piece are inputs of the next, so a restored wrapper returns tensors at the addresses
that were captured, and nothing else about a forward pass changes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from foundryd.engines.vllm import seam
from foundryd.engines.vllm.seam import Seam
from foundryd.errors import EngineUnsupported

Capture = Callable[[tuple[str, int, int, int], Callable[[], Any]], tuple[Any, Any]]

_MODULE = "vllm.compilation.cuda_graph"


def key_of(index: int, tokens: int) -> tuple[str, int, int, int]:
    """The stable name of a piece's graph: where the piece is in the model, and for how many tokens."""
    return ("PIECE", index, tokens, 0)


def wrappers(modes: Any) -> dict[int, Any]:
    """vLLM's wrappers of pieces by the pieces' places in the model; raises ``EngineUnsupported``."""
    found: dict[int, Any] = {}
    for wrapper in list(importlib.import_module(_MODULE).CUDAGraphWrapper._all_instances):
        if wrapper.runtime_mode is not modes.PIECEWISE:
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
            "vLLM has no pieces of the model to capture, though its cudagraph_mode asks for them: choose "
            "FULL_DECODE_ONLY"
        )
    return dict(sorted(found.items()))


@contextmanager
def recording(capture: Capture) -> Iterator[None]:
    """Inside, each piece that vLLM would capture is captured by ``capture``.

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
    index = int(wrapper.runnable.piecewise_compile_index)
    graph, kept = capture(key_of(index, batch.num_tokens), fn)
    _enter(wrapper, batch, graph, kept)
    # The next piece reads it under capture: it must be in use until then.
    return outputs.pop()


def give(wrapper: Any, tokens: int, graph: Any, kept: Any) -> None:
    """Lets a wrapper have a restored graph for so many tokens; ``kept`` is what was recorded with it."""
    batch = importlib.import_module("vllm.forward_context").BatchDescriptor(num_tokens=tokens, has_lora=False)
    _enter(wrapper, batch, graph, kept)


def _enter(wrapper: Any, batch: Any, graph: Any, kept: Any) -> None:
    entry = importlib.import_module(_MODULE).CUDAGraphEntry
    wrapper.concrete_cudagraph_entries[batch] = entry(
        batch_descriptor=batch, cudagraph=graph, output=kept["output"], input_addresses=list(kept["inputs"])
    )
