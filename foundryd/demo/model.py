# SPDX-License-Identifier: Apache-2.0
"""One decode step of one rank, as launches on the device's stream.

Nothing here waits, and nothing reads device memory from the host, so a step can be captured.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cuda.bindings import driver

from foundryd.demo.config import DemoConfig
from foundryd.demo.device import Device, Kernel, Library, Module, checked
from foundryd.demo.images import Baking, Images
from foundryd.demo.nccl import Communicator
from foundryd.demo.numerics import decay_table
from foundryd.session.arrays import DeviceArray


@dataclass(frozen=True)
class Shard:
    """A rank's part of the model: its place, and how much of each split dimension it has."""

    tp: int
    ep: int
    heads: int
    kv_heads: int
    vocab: int
    intermediate: int
    experts: int

    @classmethod
    def of(cls, c: DemoConfig, rank: int) -> Shard:
        place = c.mesh.place(rank)
        return cls(
            tp=place["tp"],
            ep=place["ep"],
            heads=c.heads // c.mesh.tp,
            kv_heads=c.kv_heads // c.mesh.tp,
            vocab=c.vocab // c.mesh.tp,
            intermediate=c.intermediate // c.mesh.tp,
            experts=c.experts // c.mesh.ep,
        )

    @property
    def first_token(self) -> int:
        return self.tp * self.vocab

    @property
    def first_expert(self) -> int:
        return self.ep * self.experts


class AttentionParams(ctypes.Structure):
    """``AttentionParams`` of kernels/attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "qkv", "keys", "values", "decay", "positions")),
        *((name, ctypes.c_void_p) for name in ("page_table", "slopes", "semaphore")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "kv_heads", "dim", "max_seq")),
        ("scale", ctypes.c_float),
    )


class Kernels:
    """Every kernel of the step, loaded, and the globals that go with them, written."""

    def __init__(self, device: Device, images: Images, shard: Shard) -> None:
        baking = Baking(shard.first_token, shard.first_expert)

        def image(name: str) -> bytes:
            return images.image(name, baking)

        def kernel(
            owner: Module | Library, name: str, types: str | type[ctypes.Structure], packed: bool = False
        ) -> Kernel:
            return Kernel(device, owner.function(name), types, packed=packed)

        dense, baked, sampling = Library(image("dense")), Library(image("baked")), Library(image("sampling"))
        attention, moe = Module(image("attention")), Module(image("moe"))
        self.owners = (dense, baked, sampling, attention, moe)

        self.rms_norm = kernel(dense, "rms_norm", "PPPii")
        self.project = kernel(dense, "project", "PPPiiif", packed=True)
        self.project_part = kernel(dense, "project_part", "PPPiii")
        self.add_residual = kernel(dense, "add_residual", "PPif")

        self.rope_table = kernel(attention, "rope_table", "Pii")
        self.rope_append = kernel(attention, "rope_append", "PPPPPiiiii")
        self.attend = kernel(attention, "attend", AttentionParams)

        self.embed = kernel(baked, "embed", "PPPiii")
        self.expert_up = kernel(baked, "expert_up", "PPPiiiiiif")

        self.route = kernel(moe, "route", "PPPiiif")
        self.pack_slots = kernel(moe, "pack_slots", "PPPiiii")
        self.pack_rows = kernel(moe, "pack_rows", "PPPPiii")
        self.expert_gate = kernel(moe, "expert_gate", "PPPiiiiiif")
        self.expert_down = kernel(moe, "expert_down", "PPPPiiiiiii")
        self.combine_slots = kernel(moe, "combine_slots", "PPPiiii")
        self.combine_rows = kernel(moe, "combine_rows", "PPPiii")
        self.add_experts = kernel(moe, "add_experts", "PPPiiif")

        self.mask_special = kernel(sampling, "mask_special", "Pii")
        self.slice_argmax = kernel(sampling, "slice_argmax", "PPiii")
        self.pick = kernel(sampling, "pick", "PPii")

        # Ranks learn their place in three ways, as those of real engines do: from a kernel's parameters, from its
        # code (`baked`), and from globals that the host writes.
        self.decay, _ = moe.variable("decay")
        device.upload(self.decay, decay_table())
        device.upload(moe.variable("place")[0], np.array([shard.tp, shard.ep], dtype=np.int32))
        device.upload(sampling.variable("slice_start")[0], np.array([shard.first_token], dtype=np.int32))


@dataclass(frozen=True)
class Inputs:
    """What the host gives to a step: device int32 [max_batch] each, and positions in page-locked host memory."""

    tokens: int
    positions: int
    host_positions: int


class _Activations:
    """Buffers of a step, each sized for the largest batch, shared by all batch sizes, and the RoPE table.

    They are allocated by the first step, so a process whose graphs are restored never allocates them.
    """

    def __init__(self, device: Device, kernels: Kernels, c: DemoConfig, s: Shard) -> None:
        rows, width = c.max_batch, c.hidden
        gathered = rows * c.mesh.ep
        slots = gathered * c.top_k
        row_width = max(width + 2 * c.top_k, c.top_k * (width + 1))
        self.rope = device.allocate((c.max_seq, c.head_dim // 2, 2))
        self.x = device.allocate((rows, width))
        self.h = device.allocate((rows, width))
        self.qkv = device.allocate((rows, s.heads + 2 * s.kv_heads, c.head_dim))
        self.attended = device.allocate((rows, s.heads, c.head_dim))
        self.sum = device.allocate((rows, width))
        self.router = device.allocate((rows, c.experts))
        self.chosen = device.allocate((rows, c.top_k))
        self.weights = device.allocate((rows, c.top_k))
        self.send = device.allocate((gathered, row_width))
        self.received = device.allocate((gathered, row_width))
        self.gate_up = device.allocate((slots, 2 * s.intermediate))
        self.active = device.allocate((slots, s.intermediate))
        self.expert_out = device.allocate((slots, width))
        self.expert_back = device.allocate((slots, width))
        self.logits = device.allocate((rows, s.vocab))
        self.best = device.allocate((rows, 2))
        self.all_best = device.allocate((c.mesh.tp, rows, 2))
        self.next = device.allocate((rows,))
        kernels.rope_table(c.max_seq * c.head_dim // 2, self.rope, c.max_seq, c.head_dim // 2)


class Model:
    """A rank's decode step.

    Parameters
    ----------
    weights : address of each tensor of the rank's shard.
    cache : address of keys and values of each layer, float32 [max_batch, max_seq, kv_heads, head_dim] each.
    tp, ep : communicators of the axes, None where an axis has one place.
    """

    def __init__(
        self,
        config: DemoConfig,
        shard: Shard,
        device: Device,
        kernels: Kernels,
        weights: dict[str, int],
        cache: list[tuple[int, int]],
        inputs: Inputs,
        tp: Communicator | None,
        ep: Communicator | None,
    ) -> None:
        self.c, self.s = config, shard
        self.device, self.k = device, kernels
        self.w, self.cache, self.inputs = weights, cache, inputs
        self.tp, self.ep = tp, ep
        # What a host leaves in fields that no kernel reads: addresses of its own heap, different in each process.
        self._unused = [ctypes.create_string_buffer(64) for _ in range(3)]

    @cached_property
    def buffers(self) -> _Activations:
        return _Activations(self.device, self.k, self.c, self.s)

    def step(self, rows: int) -> DeviceArray:
        """Decodes one token of ``rows`` requests; the sampled tokens, int32 [rows], are the next step's input too."""
        c, s, k, b, stream = self.c, self.s, self.k, self.buffers, self.device.stream
        checked(driver.cuMemcpyHtoDAsync, self.inputs.positions, self.inputs.host_positions, 4 * rows, stream)
        k.embed(rows, b.x, self.inputs.tokens, self.w["embed"], rows, c.hidden, s.vocab)
        self._sum_over_tp(b.x, rows * c.hidden)
        for layer in range(c.layers):
            at = f"layers.{layer}."
            k.rms_norm(rows, b.h, b.x, self.w[at + "attention_norm"], rows, c.hidden)
            self._attention(rows, at, *self.cache[layer])
            k.add_residual(rows * c.hidden, b.x, b.sum, rows * c.hidden, c.scales.attention)
            k.rms_norm(rows, b.h, b.x, self.w[at + "moe_norm"], rows, c.hidden)
            self._experts(rows, at)
            k.add_experts(rows * c.hidden, b.x, b.sum, b.weights, rows, c.hidden, c.top_k, c.scales.experts)
        k.rms_norm(rows, b.h, b.x, self.w["norm"], rows, c.hidden)
        self._sample(rows)
        checked(driver.cuMemcpyDtoDAsync, self.inputs.tokens, b.next, 4 * rows, stream)
        return DeviceArray(b.next, (rows,), "int32")

    def _sum_over_tp(self, buffer: int, count: int) -> None:
        if self.tp:
            self.tp.all_reduce(buffer, count, self.device.stream)

    def _attention(self, rows: int, at: str, keys: int, values: int) -> None:
        c, s, k, b = self.c, self.s, self.k, self.buffers
        parts = s.heads + 2 * s.kv_heads
        outputs, inner = parts * c.head_dim, s.heads * c.head_dim
        k.project(rows * outputs, b.qkv, b.h, self.w[at + "wqkv"], rows, outputs, c.hidden, c.scales.project)
        k.rope_append(
            rows * parts, b.qkv, keys, values, b.rope, self.inputs.positions, rows, s.heads, s.kv_heads, c.head_dim,
            c.max_seq,
        )  # fmt: skip
        unused = [ctypes.addressof(buffer) for buffer in self._unused]
        k.attend(
            rows * s.heads,
            AttentionParams(
                b.attended, b.qkv, keys, values, k.decay, self.inputs.positions, *unused, rows, s.heads, s.kv_heads,
                c.head_dim, c.max_seq, c.scales.score,
            ),
        )  # fmt: skip
        k.project_part(rows * c.hidden, b.sum, b.attended, self.w[at + "wo"], rows, c.hidden, inner)
        self._sum_over_tp(b.sum, rows * c.hidden)

    def _experts(self, rows: int, at: str) -> None:
        c, k, b = self.c, self.k, self.buffers
        k.project_part(rows * c.experts, b.router, b.h, self.w[at + "router"], rows, c.experts, c.hidden)
        k.route(rows, b.chosen, b.weights, b.router, rows, c.experts, c.top_k, c.scales.router)
        if c.dispatch == "all-to-all":
            self._by_all_to_all(rows, at)
        else:
            self._by_all_gather(rows, at)
        self._sum_over_tp(b.sum, rows * c.hidden)

    def _by_all_to_all(self, rows: int, at: str) -> None:
        """Each rank sends each other ``rows * top_k`` slots, most of them empty, and gets the results back."""
        c, s, k, b, stream = self.c, self.s, self.k, self.buffers, self.device.stream
        block = rows * c.top_k
        slots, stride = block * c.mesh.ep, c.hidden + 1
        checked(driver.cuMemsetD32Async, b.send, 0, slots * stride, stream)
        k.pack_slots(block, b.send, b.h, b.chosen, rows, c.hidden, c.top_k, s.experts)
        if self.ep:
            self.ep.all_to_all(b.send, b.received, block * stride, stream)
        self._run_experts(at, b.received if self.ep else b.send, slots, 1, stride)
        if self.ep:
            self.ep.exchange(b.expert_out, b.expert_back, block * c.hidden, stream)
        back = b.expert_back if self.ep else b.expert_out
        k.combine_slots(rows, b.sum, back, b.weights, rows, c.hidden, c.top_k, c.mesh.ep)

    def _by_all_gather(self, rows: int, at: str) -> None:
        """Each rank sees every token of its ep group, and adds its experts' part to each."""
        c, k, b, stream = self.c, self.k, self.buffers, self.device.stream
        everyone, stride = rows * c.mesh.ep, c.hidden + 2 * c.top_k
        k.pack_rows(rows, b.send, b.h, b.chosen, b.weights, rows, c.hidden, c.top_k)
        if self.ep:
            self.ep.all_gather(b.send, b.received, rows * stride, stream)
        gathered = b.received if self.ep else b.send
        self._run_experts(at, gathered, everyone * c.top_k, c.top_k, stride)
        part = b.expert_back if self.ep else b.sum
        k.combine_rows(everyone * c.hidden, part, b.expert_out, gathered, everyone, c.hidden, c.top_k)
        if self.ep:
            self.ep.reduce_scatter(part, b.sum, rows * c.hidden, stream)

    def _run_experts(self, at: str, slots_at: int, slots: int, choices: int, stride: int) -> None:
        c, s, k, b = self.c, self.s, self.k, self.buffers
        inner = s.intermediate
        shape = (slots, choices, stride, c.hidden)
        k.expert_up(
            slots * 2 * inner, b.gate_up, slots_at, self.w[at + "gate_up"], *shape, 2 * inner, s.experts,
            c.scales.project,
        )  # fmt: skip
        k.expert_gate(slots * inner, b.active, b.gate_up, slots_at, *shape, inner, s.experts, c.scales.gate)
        k.expert_down(
            slots * c.hidden, b.expert_out, b.active, slots_at, self.w[at + "down"], *shape, inner, s.first_expert,
            s.experts,
        )  # fmt: skip

    def _sample(self, rows: int) -> None:
        c, s, k, b = self.c, self.s, self.k, self.buffers
        k.project_part(rows * s.vocab, b.logits, b.h, self.w["lm_head"], rows, s.vocab, c.hidden)
        k.mask_special(rows, b.logits, rows, s.vocab)
        k.slice_argmax(rows, b.best, b.logits, rows, s.vocab, s.first_token)
        if self.tp:
            self.tp.all_gather(b.best, b.all_best, rows * 2, self.device.stream)
        k.pick(rows, b.next, b.all_best if self.tp else b.best, rows, c.mesh.tp)
