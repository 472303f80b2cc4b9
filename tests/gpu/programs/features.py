# SPDX-License-Identifier: Apache-2.0
"""Small cases, one feature of PyTorch under CUDA graphs each, for ``torch_features.py``.

A case is a function of ``Site`` that makes its inputs and returns what one replay does.  Inputs live in the ``io``
arena and are fed before each replay; the case's function reads them and returns its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everybody uses)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Step = Callable[[], Any]
BF16 = torch.bfloat16


@dataclass
class Site:
    """Where a case gets its tensors.

    Attributes
    ----------
    inputs : refilled before each replay: floats with normal values, integers with values below their ``limit``.
    generators : that the case draws from.
    """

    device: torch.device
    arena: Callable[[str], Any]
    inputs: list[tuple[Tensor, int]] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)

    def input(self, *shape: int, dtype: torch.dtype = torch.float32, limit: int = 0) -> Tensor:
        """A device tensor that changes between replays."""
        with self.arena("io"):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.inputs.append((tensor.zero_(), limit))
        return tensor

    def pinned(self, *shape: int) -> Tensor:
        """A page-locked float32 tensor that changes between replays."""
        with self.arena("host"):
            tensor = torch.empty(shape, pin_memory=True)
        self.inputs.append((tensor.zero_(), 0))
        return tensor

    def generator(self) -> torch.Generator:
        """A Philox generator of the device."""
        generator = torch.Generator(self.device)
        self.generators.append(generator)
        return generator


CASES: dict[str, Callable[[Site], Step]] = {}


def case(function: Callable[[Site], Step]) -> Callable[[Site], Step]:
    """Registers a case under the function's name."""
    CASES[function.__name__] = function
    return function


# --- elementwise, reductions, indexing --------------------------------------------------------------------------------


@case
def elementwise(site: Site) -> Step:
    x, y = site.input(1000, 7), site.input(7)
    return lambda: (torch.sigmoid(x * 3 + y) - x.abs().sqrt(), x.to(BF16), x > y)


@case
def in_place(site: Site) -> Step:
    x, total = site.input(4096), site.input(4096)

    def step() -> Tensor:
        total.add_(x).mul_(0.5)
        return total.clone()

    return step


@case
def reductions(site: Site) -> Step:
    x = site.input(512, 1000)
    return lambda: {"sum": x.sum(-1), "mean": x.mean(0), "max": x.max(-1), "var": x.var(-1), "norm": x.norm()}


@case
def softmax(site: Site) -> Step:
    x = site.input(8, 32000, dtype=BF16)
    return lambda: (x.softmax(-1), x.float().log_softmax(-1)[:, :8])


@case
def cumulative_sum(site: Site) -> Step:
    x, n = site.input(100, 3000), site.input(70000, dtype=torch.int64, limit=5)
    return lambda: (x.cumsum(-1), n.cumsum(0))


@case
def top_k(site: Site) -> Step:
    x = site.input(16, 20000)
    return lambda: x.topk(50, -1)


@case
def sort(site: Site) -> Step:
    short, long = site.input(32, 1000), site.input(200000)
    return lambda: (short.sort(dim=-1, stable=True), long.sort(stable=True), short.argmax(-1))


@case
def gather_and_scatter(site: Site) -> Step:
    x, table = site.input(64, 128), site.input(1000, 128)
    index = site.input(64, dtype=torch.int64, limit=1000)

    def step() -> Any:
        out = torch.zeros_like(table)
        out[torch.arange(64, device=x.device)] = x
        return table[index], out.index_select(0, index), table.gather(0, index[:, None].expand(-1, 128))

    return step


@case
def embedding(site: Site) -> Step:
    table, tokens = site.input(32768, 256, dtype=BF16), site.input(48, dtype=torch.int64, limit=32768)
    return lambda: F.embedding(tokens, table)


@case
def normalisation(site: Site) -> Step:
    x, w = site.input(64, 4096, dtype=BF16), site.input(4096, dtype=BF16)
    return lambda: (F.rms_norm(x, (4096,), w), F.layer_norm(x, (4096,), w))


# --- matrices ---------------------------------------------------------------------------------------------------------


@case
def matmul_fp32(site: Site) -> Step:
    a, b = site.input(100, 300), site.input(300, 200)
    return lambda: a @ b


@case
def matmul_bf16(site: Site) -> Step:
    """Shapes of a decode step: cuBLAS chooses kernels that take their arguments packed."""
    a, b = site.input(64, 4096, dtype=BF16), site.input(12288, 4096, dtype=BF16)
    return lambda: [F.linear(a[:rows], b) for rows in (1, 2, 7, 16, 33, 64)]


@case
def matmul_split_k(site: Site) -> Step:
    """Few outputs of a long sum: split over blocks that meet in a workspace."""
    a, b = site.input(8, 16384, dtype=BF16), site.input(128, 16384, dtype=BF16)
    wide, tall = site.input(16, 65536), site.input(65536, 16)
    return lambda: (F.linear(a, b), wide @ tall)


@case
def matmul_batched(site: Site) -> Step:
    a, b = site.input(24, 17, 64, dtype=BF16), site.input(24, 64, 40, dtype=BF16)
    return lambda: (torch.bmm(a, b), torch.einsum("bij,bkj->bik", a.float(), b.float().transpose(1, 2)))


@case
def linear_bias_gelu(site: Site) -> Step:
    x, w, b = (site.input(*s, dtype=BF16) for s in ((32, 1024), (4096, 1024), (4096,)))
    return lambda: (F.gelu(F.linear(x, w, b), approximate="tanh"), torch._addmm_activation(b, x, w.t(), use_gelu=True))


@case
def convolution(site: Site) -> Step:
    x, w = site.input(2, 16, 32, 32), site.input(24, 16, 3, 3)
    return lambda: F.conv2d(x, w, padding=1)


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(site: Site, backend: SDPBackend, **options: Any) -> Step:
    q, k, v = (site.input(2, 8, 128, 64, dtype=BF16) for _ in range(3))

    def step() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return step


@case
def attention_flash(site: Site) -> Step:
    return _attention(site, SDPBackend.FLASH_ATTENTION, is_causal=True)


@case
def attention_efficient(site: Site) -> Step:
    mask = site.input(128, 128, dtype=BF16)
    return _attention(site, SDPBackend.EFFICIENT_ATTENTION, attn_mask=mask)


@case
def attention_math(site: Site) -> Step:
    return _attention(site, SDPBackend.MATH)


@case
def attention_cudnn(site: Site) -> Step:
    return _attention(site, SDPBackend.CUDNN_ATTENTION, is_causal=True)


# --- Triton and compiled code -----------------------------------------------------------------------------------------


@case
def triton_kernel(site: Site) -> Step:
    from kernels import fused_add_norm

    x, delta, w = (site.input(*s, dtype=BF16) for s in ((33, 1536), (33, 1536), (1536,)))
    return lambda: fused_add_norm(x, delta, w, 1e-6)


@case
def compiled(site: Site) -> Step:
    x, w = site.input(64, 1024), site.input(1024, 1024)
    return torch.compile(lambda: (F.silu(x @ w) * x.cumsum(-1)).softmax(-1), fullgraph=True)


@case
def compiled_random(site: Site) -> Step:
    """Compiled code draws from the default generator, which every graph registers."""
    x = site.input(64, 1024)
    return torch.compile(lambda: F.dropout(x, 0.3, training=True), fullgraph=True)


# --- random numbers ---------------------------------------------------------------------------------------------------


@case
def random_default(site: Site) -> Step:
    x = site.input(1000)
    return lambda: (torch.rand_like(x), F.dropout(x, 0.5, training=True))


@case
def random_own_generator(site: Site) -> Step:
    generator = site.generator()
    options: dict[str, Any] = {"generator": generator, "device": site.device}
    return lambda: (torch.rand(777, **options), torch.randn(3, 5, **options), torch.randint(0, 99, (64,), **options))


@case
def random_two_generators(site: Site) -> Step:
    one, two = site.generator(), site.generator()
    return lambda: [torch.rand(100, generator=g, device=site.device) for g in (one, two, one)]


@case
def random_sampling(site: Site) -> Step:
    logits, generator = site.input(16, 5000), site.generator()

    def step() -> Tensor:
        noise = torch.empty_like(logits).exponential_(generator=generator)
        return (logits.softmax(-1) / noise).argmax(-1)

    return step


# --- the shape of a graph ---------------------------------------------------------------------------------------------


@case
def side_stream(site: Site) -> Step:
    """A fork to another stream and back, which becomes two branches."""
    x, w = site.input(256, 256), site.input(256, 256)
    side = torch.cuda.Stream()

    def step() -> Any:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            left = (x @ w).relu()
        right = x.exp().sum(-1)
        here.wait_stream(side)
        left.record_stream(here)
        return left + right, right

    return step


@case
def two_side_streams(site: Site) -> Step:
    x = site.input(4096)
    streams = [torch.cuda.Stream() for _ in range(2)]

    def step() -> Tensor:
        here, parts = torch.cuda.current_stream(), []
        for i, side in enumerate(streams):
            side.wait_stream(here)
            with torch.cuda.stream(side):
                parts.append(x * (i + 2))
        for side in streams:
            here.wait_stream(side)
        return parts[0] * parts[1]

    return step


@case
def pinned_copy(site: Site) -> Step:
    """A node that reads page-locked host memory as it is at the replay."""
    host, x = site.pinned(2048), site.input(2048)

    def step() -> Tensor:
        device = torch.empty_like(x)
        device.copy_(host, non_blocking=True)
        return device * 2 + x

    return step


@case
def memset_and_copy(site: Site) -> Step:
    x = site.input(64, 1000)

    def step() -> Any:
        return torch.zeros_like(x), x.clone(), torch.full_like(x, 3.5), x.t().contiguous(), x[:, ::2].clone()

    return step


# --- the shape of outputs ---------------------------------------------------------------------------------------------


@case
def output_is_an_input(site: Site) -> Step:
    x, y = site.input(100), site.input(100)

    def step() -> Any:
        y.add_(x)
        return y, y[10:20], x

    return step


@case
def views(site: Site) -> Step:
    x = site.input(30, 40)

    def step() -> Any:
        y = x * 2
        return {"t": y.t(), "part": y[3:9:2, 5:], "wide": y[:, :1].expand(-1, 7), "flat": y.view(-1)[100:], "same": y}

    return step


@case
def nested(site: Site) -> Step:
    x = site.input(6)
    return lambda: {"a": (x + 1, [x + 2, {"b": x + 3}]), "none": None, "number": 4, "text": "as it was", "flag": True}


@case
def empty_outputs(site: Site) -> Step:
    x = site.input(8, 4)
    return lambda: (x[:0], torch.empty(0, 3, device=site.device), x * 2)


@case
def scalars(site: Site) -> Step:
    x = site.input(50)
    return lambda: (x.sum(), x.max().to(torch.float64), (x > 0).any(), x.argmin())


@case
def many_types(site: Site) -> Step:
    x = site.input(64)
    kinds = (torch.float16, BF16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
    extra = (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)
    return lambda: [x.abs().to(kind) for kind in (*kinds, *extra)]


@case
def nothing(site: Site) -> Step:
    """A graph without a node."""
    x = site.input(3)
    return lambda: x
