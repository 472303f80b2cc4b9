# SPDX-License-Identifier: Apache-2.0
"""Stands for the compilation's configuration and the modes of CUDA graphs, whose compound ones are pairs."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class CUDAGraphMode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def mixed_mode(self):
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self


@dataclass
class PassConfig:
    fuse_allreduce_rms: bool | None = None
    fuse_gemm_comms: bool | None = None
    fuse_minimax_qk_norm: bool | None = None


@dataclass
class CompilationConfig:
    mode: int = 3
    backend: str = "inductor"
    custom_ops: list[str] = field(default_factory=list)
    splitting_ops: list[str] | None = None
    compile_sizes: list[int] | None = None
    compile_ranges_endpoints: list[int] | None = None
    inductor_compile_config: dict[str, Any] = field(default_factory=dict)
    inductor_passes: dict[str, str] = field(default_factory=dict)
    cudagraph_copy_inputs: bool = False
    use_inductor_graph_partition: bool = False
    pass_config: PassConfig = field(default_factory=PassConfig)
    dynamic_shapes_config: Any = None
    cudagraph_specialize_lora: bool = True
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY
    cudagraph_capture_sizes: list[int] = field(default_factory=lambda: [1, 2, 4])
