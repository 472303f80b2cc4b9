# SPDX-License-Identifier: Apache-2.0
"""The hook of this process, and the plain structs of the archive as NumPy dtypes.

Importing this needs neither the hook nor CUDA.  A call of ``Hook`` that fails raises an error of ``foundryd.errors``:
``DriverCallFailed`` (a CUDA driver or NCCL call), ``UsageError`` (a wrong argument, or a call at the wrong time),
``UnsupportedNode`` (what cannot be restored exactly), ``LayoutDiverged``, else ``RestoreError``.  It has the attributes
``status`` (``fdy_status``), ``code`` (``CUresult`` or ``ncclResult_t``) and ``call`` (the failed function).
All calls release the GIL and may come from any thread.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

Records = npt.NDArray[np.void]
"""A one-dimensional structured array of one of the dtypes below."""

NONE: int
"""``FDY_NONE``: no such index."""
HOOK_ABI: int
SETTING_CACHE_CONFIG: int
"""``attribute`` of a setting that is a function's cache configuration."""
RESERVATION_FIRST: int
"""``FDY_RESERVATION_FIRST``: where an engine's own reservations begin, in strides from the arenas' base."""
RESERVATION_STRIDES: int
"""``FDY_RESERVATION_STRIDES``: the room for the reservations of one arena."""

allocation_dtype: np.dtype[np.void]
range_dtype: np.dtype[np.void]
divergence_dtype: np.dtype[np.void]
window_dtype: np.dtype[np.void]
module_dtype: np.dtype[np.void]
function_dtype: np.dtype[np.void]
field_dtype: np.dtype[np.void]
setting_dtype: np.dtype[np.void]
global_dtype: np.dtype[np.void]
node_dtype: np.dtype[np.void]
edge_dtype: np.dtype[np.void]
attribute_dtype: np.dtype[np.void]
communicator_dtype: np.dtype[np.void]
comm_op_dtype: np.dtype[np.void]
counters_dtype: np.dtype[np.void]

class HookMode(IntEnum):
    OFF = 0
    CAPTURE = 1
    RESTORE = 2

class Arena(IntEnum):
    DEFAULT = 0
    WEIGHTS = 1
    KV = 2
    IO = 3
    GRAPH = 4
    HOST = 5

class DivergenceKind(IntEnum):
    NONE = 0
    SIZE = 1
    EXTRA = 2
    MISSING = 3
    LIFETIME = 4
    ADDRESS = 5

class ModuleApi(IntEnum):
    MODULE_LOAD_DATA = 0
    LIBRARY_LOAD_DATA = 1

class NodeType(IntEnum):
    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    EMPTY = 3
    CHILD = 4
    COMM = 5

class ParamKind(IntEnum):
    NONE = 0
    LIST = 1
    EXTRA = 2
    STRUCT = 3

class CommOpKind(IntEnum):
    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_TO_ALL = 5
    GATHER = 6
    SCATTER = 7
    SEND = 8
    RECV = 9

class Counters(TypedDict):
    """Calls that reached the driver."""

    launches: int
    captures: int
    graph_launches: int
    instantiations: int
    module_loads: int
    allocations: int

class Report:
    @property
    def mode(self) -> int: ...
    @property
    def rows_installed(self) -> int: ...
    @property
    def contexts(self) -> int: ...
    @property
    def arena_base(self) -> int: ...
    @property
    def arena_stride(self) -> int: ...
    @property
    def engine(self) -> Counters: ...
    @property
    def communication(self) -> Counters: ...
    @property
    def driver_ns(self) -> int: ...
    @property
    def driver_calls(self) -> int: ...

class Divergence:
    """The first place where this process left the recorded sequence of an arena; ``kind`` is ``DivergenceKind``."""

    @property
    def kind(self) -> int: ...
    @property
    def arena(self) -> int: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def expected_bytes(self) -> int: ...
    @property
    def actual_bytes(self) -> int: ...

class BuildMemory:
    """What building graphs needs meanwhile, kept from one to the next and given back with this object."""

class HeapRoom:
    """Room in heaps, in large pages (Linux, glibc); what is left of it stays with the heap when this object goes."""

    def make(self, bytes: int) -> None:
        """Makes room for as much in the calling thread's heap, unless it is there."""

class GraphArrays:
    """A graph as arrays that Python owns.

    Attributes
    ----------
    nodes : ``node_dtype``, in canonical order: edges go from earlier to later nodes.
    edges : ``edge_dtype``, sorted.
    attributes : ``attribute_dtype``; nodes refer to runs of it.
    params : uint8; nodes refer to runs of it.  A node's run starts at a multiple of 16.
    children : graphs of child nodes.
    """

    def __init__(
        self,
        nodes: Records,
        edges: Records,
        attributes: Records,
        params: npt.NDArray[np.uint8],
        children: Sequence[GraphArrays] = ...,
    ) -> None: ...
    @property
    def nodes(self) -> Records: ...
    @property
    def edges(self) -> Records: ...
    @property
    def attributes(self) -> Records: ...
    @property
    def params(self) -> npt.NDArray[np.uint8]: ...
    @property
    def children(self) -> list[GraphArrays]: ...

def available() -> bool:
    """True if the hook is loaded into this process."""

class Hook:
    """The hook of this process.

    Raises
    ------
    HookMissing
        If it is not preloaded.
    """

    def __init__(self) -> None: ...
    def report(self) -> Report:
        """What the hook has done so far; the driver's time is of the calling thread."""

    def time_driver(self, on: bool) -> None:
        """Whether driver calls that go through the hook are timed; at first they are not."""

    def driver_enter(self) -> None:
        """Begins a driver call that does not go through the hook, so that its time counts; ``driver_leave`` ends it."""

    def driver_leave(self) -> None: ...

    # --- memory ---

    def arena_push(self, arena: int) -> None:
        """Selects the arena for allocations of the calling thread; pushes nest."""

    def arena_pop(self) -> None: ...
    def set_layout(self, arena_base: int, arena_stride: int, allocations: Records) -> None:
        """Restore only, before the first context: what this process must reproduce (``allocation_dtype``)."""

    def allocations(self) -> Records:
        """Every allocation of every arena so far (``allocation_dtype``)."""

    def divergence(self) -> Divergence: ...
    def map_held(self) -> None:
        """Maps every held range that the engine did not allocate itself, zero-filled."""

    def release_held(self) -> None:
        """Gives back what ``map_held`` mapped, after a restore that failed."""

    def upload(self, address: int, data: Buffer | npt.NDArray[Any]) -> None:
        """Copies host bytes to a device address, synchronously."""

    def download(self, address: int, bytes: int) -> npt.NDArray[np.uint8]:
        """Copies ``bytes`` bytes from a device address, synchronously."""

    def download_into(self, address: int, target: Buffer) -> None:
        """The same into a writable buffer."""

    def set_rank(self, rank: int) -> None:
        """The world rank of this process, for IPC handles; ``RANK`` of the environment if this is never called."""

    def ipc_peer_handle(self, own: Buffer, rank: int) -> bytes:
        """While capturing: the IPC handle of the same allocation on another rank, from this process's own."""

    def windows(self) -> Records:
        """What is open of peers' memory (``window_dtype``), by address."""

    # --- modules ---

    def modules(self) -> Records:
        """Every module instance in load order (``module_dtype``)."""

    def module_image(self, module: int) -> bytes:
        """The exact container of an instance.  Capture only; never that of a communication library."""

    def functions(self) -> tuple[Records, Records, Records, list[str]]:
        """Functions used by the graphs read so far: ``function_dtype``, ``field_dtype``, ``setting_dtype``, names.

        Names go with the rows of the first array, in its order.
        """

    def changed_globals(self, module: int, names: Sequence[str]) -> tuple[Records, list[str]]:
        """Those of ``module_globals`` that differ from a fresh load of the same image, and their names."""

    def module_globals(self, module: int, names: Sequence[str]) -> tuple[Records, list[str]]:
        """Globals that ``names`` lists or the program asked for and the driver finds (``global_dtype``); their names.

        The hook does not look into images: ``foundryd.capture.images`` lists the names.
        """

    def image_difference(self, module: int, image: Buffer, functions: Sequence[str], globals: Sequence[str]) -> str:
        """How loading ``image`` differs from loading the module's own: in the driver's answer, in a function or global.

        The end of a sentence that begins with the image; empty if nothing differs.  Capture only.
        """

    def load_module(self, api: int, image: Buffer) -> int:
        """Loads an image, which must be exactly one container; its instance id."""

    def global_address(self, module: int, name: str) -> tuple[int, int]:
        """Address and size in bytes of a global of this process's instance."""

    def load_function(self, module: int, name: str, settings: Records | None = None) -> int:
        """Finds a function, applies ``settings`` (``setting_dtype``) and loads it in full; its handle."""

    # --- graphs ---

    def read_graph(self, graph: int) -> GraphArrays:
        """Reads a ``CUgraph``.  ``UnsupportedNode`` names the node that cannot be restored, its type and place."""

    def build_memory(self) -> BuildMemory:
        """Memory for ``build_graph``, for one thread at a time."""

    def build_graph(
        self,
        graph: GraphArrays,
        functions: npt.NDArray[np.uint64] | Sequence[int],
        comm_graphs: Sequence[int] = ...,
        memory: BuildMemory | None = ...,
    ) -> int:
        """Builds a ``CUgraph`` in the current context.

        ``functions[i]`` is the handle for ``node.function == i``, ``comm_graphs[g]`` the small graph for
        ``node.comm_group == g``; 0 where the graph does not need one.
        """

    def build_graph_and_nodes(
        self, graph: GraphArrays, functions: npt.NDArray[np.uint64] | Sequence[int], comm_graphs: Sequence[int] = ...
    ) -> tuple[int, npt.NDArray[np.uint64]]:
        """``build_graph``, and the ``CUgraphNode`` of each node."""

    def set_kernel_params(
        self,
        executable: int,
        graph: GraphArrays,
        functions: npt.NDArray[np.uint64] | Sequence[int],
        nodes: npt.NDArray[np.uint64],
        which: npt.NDArray[np.uint32],
    ) -> None:
        """Gives the kernels at the places ``which`` of an executable the parameters that they have in ``graph``.

        ``nodes`` are from ``build_graph_and_nodes``.  On failure those before the one that failed are changed.
        """

    def destroy_graph(self, graph: int) -> None:
        """Frees a graph of ``build_graph`` or ``comm_reissue``; small graphs after the graphs built from them."""

    # --- communication ---

    def comm_declare(self, communicator: int, ranks: Sequence[int] | npt.NDArray[Any]) -> None:
        """Says which world ranks a communicator has, in its own order; a restoring rank gives 0 for one it lacks."""

    def communicators(self) -> tuple[Records, npt.NDArray[np.uint32]]:
        """Communicators in creation order (``communicator_dtype``), and the world ranks that they refer to."""

    def comm_ops(self) -> Records:
        """Collective calls recorded under capture, in order (``comm_op_dtype``)."""

    def comm_reissue(self, ops: Records) -> int:
        """Issues the calls of one group again under capture on a private stream; the small graph.

        Every rank of the communicator must do so, in one order.  Needs a current context.
        """
