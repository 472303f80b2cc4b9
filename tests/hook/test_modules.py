# SPDX-License-Identifier: Apache-2.0
"""What the hook records about modules, functions and globals, and loads again."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from foundryd import _native


@pytest.fixture(scope="module")
def image() -> bytes:
    return _native.image("hooktest").read_bytes()


def test_instances_come_in_load_order_with_the_exact_container(hooked: Any, image: bytes) -> None:
    found = hooked.graphs(
        """
        start()
        wrapped = c.create_string_buffer(image() + b"the next container of the section")
        wrapper = struct.pack("<IIQQ", 0x466243B1, 1, c.addressof(wrapped), 0)
        first = ok(cu.cuModuleLoadData(image() + b"tail"))
        second = ok(cu.cuLibraryLoadData(image(), [], [], 0, [], [], 0))
        third = ok(cu.cuModuleLoadFatBinary(wrapper))
        answer([
            [[int(m["id"]), int(m["api"]), int(m["image_bytes"]), int(m["handle"]), int(m["live"]),
              int(m["communication"])] for m in hook.modules()],
            [int(first), int(second), int(third)],
            [base64.b64encode(hook.module_image(i)).decode() for i in range(3)],
        ])
        """,
    )
    modules, handles, images = found
    expected = [
        [i, api, len(image), handle, 1, 0] for i, (api, handle) in enumerate(zip((0, 1, 0), handles, strict=True))
    ]
    assert modules == expected
    assert [base64.b64decode(text) for text in images] == [image] * 3


def test_files_are_recorded_like_bytes(hooked: Any, image: bytes) -> None:
    path = str(_native.image("hooktest"))
    found = hooked.graphs(
        f"""
        start()
        ok(cu.cuModuleLoad({path.encode()!r}))
        ok(cu.cuLibraryLoadFromFile({path.encode()!r}, [], [], 0, [], [], 0))
        answer([[int(m["api"]), int(m["image_bytes"]), len(hook.module_image(int(m["id"])))] for m in hook.modules()])
        """,
    )
    assert found == [[0, len(image), len(image)], [1, len(image), len(image)]]


def test_an_elf_file_is_measured_by_its_headers(hooked: Any, image: bytes) -> None:
    """What cuLinkComplete answers is such a file, without any container."""
    found = hooked.graphs(
        """
        start()
        code = elf()
        module = Module(data=code + bytes(100))
        write = malloc(64)
        write_words(write, [3])
        launch(module.function("mad"), stream(), u64(write, 2, 1))
        image_bytes = int(hook.modules()[0]["image_bytes"])
        answer([image_bytes, len(code), hook.module_image(0) == code[:image_bytes], words(write, 1)])
        """,
    )
    size, padded, same, value = found
    assert padded - 8 < size <= padded
    assert same
    assert value == [7]


def test_functions_of_two_instances_of_an_image_are_kept_apart(hooked: Any) -> None:
    program = """
        start()
        one, two = Module(library={library}), Module(library={library})
        out = malloc(64)
        write_words(out, [0, 0])
        def body(s):
            launch(one.function("count"), s, u64(out))
            launch(two.function("count"), s, u64(out + 8))
            launch(two.function("count"), s, u64(out + 8))
        graph = hook.read_graph(int(capture(body)))
        functions, _, _, names = hook.functions()
        answer([graph.nodes["function"].tolist(), functions["module"].tolist(), names])
    """
    for library in (False, True):
        nodes, modules, names = hooked.graphs(program.format(library=library))
        assert nodes == [0, 1, 1]
        assert modules == [0, 1]
        assert names == ["count", "count"]


def test_a_kernel_passed_as_a_function_is_found_in_its_library(hooked: Any) -> None:
    """As the CUDA runtime does: no function is made of the kernel before it is launched.  Only launches take it."""
    found = hooked.graphs(
        """
        start()
        Module()  # another instance of the same image
        library, out = Module(library=True), malloc(8)
        kernels = ok(cu.cuLibraryEnumerateKernels(20, library.handle))
        enumerated = {ok(cu.cuKernelGetName(k)).decode(): k for k in kernels if int(k)}
        write_words(out, [1])
        def body(s):
            launch(cu.CUfunction(int(library.kernel("mad"))), s, u64(out, 2, 1))
            launch(cu.CUfunction(int(enumerated["count"])), s, u64(out))
            launch(library.function("mad"), s, u64(out, 2, 1))
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ok(cu.cuKernelSetAttribute(limit, 512, library.kernel("mad"), 0))
        refused = cu.cuFuncSetAttribute(cu.CUfunction(int(library.kernel("mad"))), limit, 1024)[0].name
        read = hook.read_graph(int(capture(body)))
        functions, fields, settings, names = hook.functions()
        answer([read.nodes["function"].tolist(), names, functions[["module", "param_count"]].tolist(),
                settings.tolist(), refused])
        """
    )
    assert found == [[0, 1, 0], ["mad", "count"], [[1, 3], [1, 1]], [[8, 512]], "CUDA_ERROR_INVALID_HANDLE"]


def test_changed_globals_are_found_whoever_wrote_them(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        quiet, loud = Module(), Module(library=True)
        address, size = loud.global_address("zeroed")
        ok(cu.cuMemcpyHtoD(address + 3, b"x", 1))
        launch(loud.function("touch"), stream(), [])
        ok(cu.cuCtxSynchronize())
        def told(call, module):
            table, names = call(module, ["counter", "nobody", "table", "zeroed"])
            return sorted([n, int(g["bytes"]), int(g["module"])] for n, g in zip(names, table, strict=True))
        changed, names = hook.changed_globals(1, ["table"])
        content = {
            n: hook.download(int(g["address"]), int(g["bytes"])).tolist() for n, g in zip(names, changed, strict=True)
        }
        answer([told(hook.changed_globals, 0), told(hook.changed_globals, 1), told(hook.module_globals, 0), content,
                int(hook.global_address(1, "zeroed")[0]) == address, len(hook.modules()),
                told(lambda module, _: hook.module_globals(module, []), 0)])
        """,
    )
    assert found[0] == []
    assert found[1] == [["table", 16, 1], ["zeroed", 64, 1]]
    assert found[2] == [["counter", 8, 0], ["table", 16, 0], ["zeroed", 64, 0]]
    assert found[3]["table"] == [1, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]
    assert found[3]["zeroed"][3] == ord("x")
    assert found[4]
    assert found[5] == 2  # the fresh loads are not instances
    assert found[6] == []


def test_settings_are_the_last_values_of_each_function(hooked: Any) -> None:
    attribute = "cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_"
    found = hooked.graphs(
        f"""
        start()
        module, library = Module(), Module(library=True)
        limit, carve = {attribute}MAX_DYNAMIC_SHARED_SIZE_BYTES, {attribute}PREFERRED_SHARED_MEMORY_CARVEOUT
        mad = module.function("mad")
        for value in (1024, 4096):
            ok(cu.cuFuncSetAttribute(mad, limit, value))
        ok(cu.cuFuncSetCacheConfig(mad, cu.CUfunc_cache.CU_FUNC_CACHE_PREFER_L1))
        ok(cu.cuKernelSetAttribute(carve, 50, library.kernel("mad"), cu.CUdevice(0)))
        out = malloc(8)
        write_words(out, [1])
        def body(s):
            launch(mad, s, u64(out, 1, 1))
            launch(library.function("mad"), s, u64(out, 1, 1))
            launch(library.function("count"), s, u64(out))
        hook.read_graph(int(capture(body)))
        functions, _, settings, names = hook.functions()
        answer([[int(f["module"]), n, settings[f["setting_first"]:][:f["setting_count"]].tolist()]
                for f, n in zip(functions, names, strict=True)])
        """,
    )
    assert found == [[0, "mad", [[-1, 2], [8, 4096]]], [1, "mad", [[9, 50]]], [1, "count", []]]


def test_limits_allow_every_node_whatever_was_set_last(hooked: Any) -> None:
    """A program may set them for each launch anew, and larger batches, which need more, are often captured first."""
    attribute = "cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_"
    found = hooked.graphs(
        f"""
        start()
        module = Module()
        shared, cluster = {attribute}MAX_DYNAMIC_SHARED_SIZE_BYTES, {attribute}NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        shape = module.function("shape")
        hook.arena_push(_hook.Arena.IO)
        out = malloc(32)
        hook.arena_pop()
        def body(s, sizes):
            for size in sizes:
                ok(cu.cuFuncSetAttribute(shape, shared, size))
                ok(cu.cuFuncSetAttribute(shape, cluster, int(size > 90000)))
                launch(shape, s, u64(out), shared=size)
        first = plain(hook.read_graph(int(capture(lambda s: body(s, [100000])))))
        both = plain(hook.read_graph(int(capture(lambda s: body(s, [60000, 70000, 50000])))))
        answer([recorded(hook), first, both])
        """,
    )
    assert found[0]["functions"] == [[0, "shape", [[8, 100000], [14, 1]]]]
    seen = hooked.graphs(
        """
        recorded, *graphs = given()
        start()
        hook.arena_push(_hook.Arena.IO)
        out = malloc(32)
        hook.arena_pop()
        functions = load(hook, recorded)
        seen = []
        for graph in graphs:
            built = hook.build_graph(arrays(graph), functions, [])
            replay(built)
            seen.append(words(out, 4)[3] & 0xFFFFFFFF)
        answer(seen)
        """,
        "restore",
        given=found,
    )
    assert seen == [100000, 50000]


@pytest.mark.parametrize("library", [False, True], ids=["module", "library"])
@pytest.mark.parametrize(
    ("kind", "option", "forced", "why"),
    [
        ("elf", "MAX_REGISTERS", "", ""),
        ("elf", "GLOBAL_SYMBOL_ADDRESSES", "", "gave symbols of it addresses with JIT option 18"),
        ("code", "MAX_REGISTERS", "", ""),
        ("both", "MAX_REGISTERS", "", ""),
        ("both", "MAX_REGISTERS", "0", ""),
        ("both", "LOG_VERBOSE", "1", ""),
        ("both", "MAX_REGISTERS", "1", "compiled from PTX with JIT option 0"),
        ("code", "MAX_REGISTERS", "1", ""),
    ],
)
def test_options_of_a_compiler_are_refused_where_it_could_have_run(
    hooked: Any, library: bool, kind: str, option: str, forced: str, why: str
) -> None:
    """A container with PTX is compiled as bare PTX is, and a restore loads it without options."""
    kind_refused, text = hooked.graphs(
        f"""
        start()
        def entry(kind, code):
            code += bytes(-len(code) % 8)
            return struct.pack("<HHIQIIHHIIIQQQ", kind, 257, 64, len(code), 0, 0, 0, 1, 90, 0, 0, 0x11, 0, 0) + code
        parts = {{"code": [entry(2, elf())], "both": [entry(1, b".version 8.0"), entry(2, elf())]}}
        body = b"".join(parts.get({kind!r}, []))
        data = elf() if {kind!r} == "elf" else struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
        option = cu.CUjit_option.CU_JIT_{option}
        value = [0] if option == cu.CUjit_option.CU_JIT_GLOBAL_SYMBOL_ADDRESSES else 32
        if {library}:
            handle = ok(cu.cuLibraryLoadData(data, [option], [value], 1, [], [], 0))
            mad = ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(handle, b"mad"))))
        else:
            mad = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadDataEx(data, 1, [option], [value])), b"mad"))
        out = malloc(8)
        graph = capture(lambda s: launch(mad, s, u64(out, 1, 1)))
        answer(refusal(lambda: hook.read_graph(int(graph))))
        """,
        env={"CUDA_FORCE_PTX_JIT": forced},
    )
    assert kind_refused == ("UnsupportedNode" if why else "nothing"), text
    assert why in text


def test_an_unloaded_module_is_dead_and_its_handle_may_come_back(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        out = malloc(8)
        for _ in range(3):
            module = ok(cu.cuModuleLoadData(image()))
            f = ok(cu.cuModuleGetFunction(module, b"mad"))
            graph = capture(lambda s: launch(f, s, u64(out, 1, 1)))
            hook.read_graph(int(graph))
            ok(cu.cuModuleUnload(module))
        functions, _, _, names = hook.functions()
        answer([hook.modules()["live"].tolist(), functions["module"].tolist(), names,
                refusal(lambda: hook.global_address(0, "counter"))])
        """,
    )
    assert found[:3] == [[0, 0, 0], [0, 1, 2], ["mad"] * 3]
    assert found[3][0] == "UsageError"
    assert "unloaded" in found[3][1]


@pytest.mark.parametrize("library", [False, True], ids=["module", "library"])
def test_a_module_that_the_driver_does_not_unload_stays_known(hooked: Any, library: bool) -> None:
    """No module is unloaded while the thread captures."""
    call = "cuLibraryUnload" if library else "cuModuleUnload"
    refused, live, found, names = hooked.graphs(
        f"""
        start()
        out, module = malloc(8), Module({library})
        f = module.function("mad")
        codes = []
        def body(s):
            launch(f, s, u64(out, 1, 1))
            codes.append(int(cu.{call}(module.handle)[0]))
        try:
            capture(body)
        except CudaError:
            pass
        before = hook.modules()["live"].tolist()
        graph = capture(lambda s: launch(f, s, u64(out, 1, 1)))
        found = refusal(lambda: hook.read_graph(int(graph)))
        address, _ = module.global_address("counter")
        answer([codes[0] != 0, before, found, hook.global_address(0, "counter")[0] == address])
        """
    )
    assert (refused, live, found[0], names) == (True, [1], "nothing", True)


def test_parameter_fields_come_with_their_gaps(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        module, out = Module(), malloc(8)
        def body(s):
            launch(module.function("gaps"), s, [(1, c.c_uint8), (2.0, c.c_double), (3, c.c_uint16), (out, c.c_uint64)])
        hook.read_graph(int(capture(body)))
        functions, fields, _, _ = hook.functions()
        answer([fields.tolist(), int(functions[0]["param_bytes"]), int(functions[0]["param_count"])])
        """,
    )
    assert found == [[[0, 1], [8, 8], [16, 2], [24, 8]], 32, 4]


@pytest.mark.parametrize("library", [0, 1])
def test_what_was_recorded_loads_with_its_settings(hooked: Any, image: bytes, library: int) -> None:
    found = hooked.graphs(
        """
        api, data = given()
        start()
        module = hook.load_module(api, base64.b64decode(data))
        settings = np.array([(8, 2048), (hook_cache, 2)], _hook.setting_dtype)
        function = cu.CUfunction(hook.load_function(module, "mad", settings))
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        out = malloc(8)
        write_words(out, [5])
        launch(function, stream(), u64(out, 3, 1))
        address, size = hook.global_address(module, "counter")
        answer([module, ok(cu.cuFuncGetAttribute(limit, function)), words(out, 1), words(address, 1), size,
                refusal(lambda: hook.load_function(module, "nobody")),
                refusal(lambda: hook.global_address(module, "nobody")),
                refusal(lambda: hook.load_function(module + 1, "mad")),
                refusal(lambda: hook.load_function(module, "mad", np.array([(8, -5)], _hook.setting_dtype)))])
        """.replace("hook_cache", "_hook.SETTING_CACHE_CONFIG"),
        mode="restore",
        given=[library, base64.b64encode(image).decode()],
    )
    assert found[:5] == [0, 2048, [16], [5], 8]
    assert [error for error, _ in found[5:]] == ["RestoreError", "RestoreError", "UsageError", "DriverCallFailed"]
    assert "nobody" in found[5][1]
    assert "nobody" in found[6][1]
    assert "mad" in found[8][1]


def test_a_damaged_image_is_refused_before_the_driver_sees_it(hooked: Any, image: bytes) -> None:
    found = hooked.graphs(
        """
        start()
        good = image()
        bad = [b"", b"\\0", good[:8], good[:-1], good + b"x", b"ELF" + good[3:], elf()[:200],
               good[:8] + struct.pack("<Q", 2**64 - 1) + good[16:], b"// text without an end",
               struct.pack("<IHHQ", 0xBA55ED50, 1, 0xffff, 0)]
        before = hook.report().engine["module_loads"]
        refused = [refusal(lambda: hook.load_module(0, data)) for data in bad]
        answer([refused, refusal(lambda: hook.load_module(9, good)), hook.report().engine["module_loads"] - before])
        """,
        mode="restore",
    )
    assert {error for error, _ in found[0]} == {"UsageError"}
    assert found[1][0] == "UsageError"
    assert found[2] == 0


def test_several_containers_behind_one_wrapper_are_refused_where_they_are_used(hooked: Any, compile_c: Any) -> None:
    """A driver links them, the software driver does not: a library in front of it loads the first one instead."""
    linker = compile_c(
        "linker.so",
        """
        #include <dlfcn.h>
        typedef int (*load)(void **, const void *);
        int cuModuleLoadFatBinary(void **module, const void *wrapper) {
          return ((load)dlsym(RTLD_NEXT, "cuModuleLoadData"))(module, ((void **)wrapper)[1]);
        }
        """,
        cuda=True,
    )
    found = hooked.graphs(
        """
        start()
        one = c.create_string_buffer(image())
        linked = (c.c_void_p * 2)(c.addressof(one), None)
        wrapper = c.create_string_buffer(struct.pack("<IIQQ", 0x466243B1, 2, c.addressof(one), c.addressof(linked)))
        module = c.c_void_p()
        assert c.CDLL(None).cuModuleLoadFatBinary(c.byref(module), wrapper) == 0
        f, out = ok(cu.cuModuleGetFunction(cu.CUmodule(module.value), b"mad")), malloc(8)
        graph = capture(lambda s: launch(f, s, u64(out, 1, 1)))
        answer([refusal(lambda: hook.module_image(0)), refusal(lambda: hook.read_graph(int(graph))),
                hook.modules()["image_bytes"].tolist()])
        """,
        preload=[linker],
    )
    assert [error for error, _ in found[:2]] == ["UnsupportedNode", "UnsupportedNode"]
    assert "several containers" in found[0][1]
    assert "function mad" in found[1][1]
    assert found[2] == [0]


def test_nothing_is_recorded_without_a_mode(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        module, out = Module(), malloc(8)
        write_words(out, [1])
        launch(module.function("mad"), stream(), u64(out, 1, 1))
        report = hook.report()
        answer([len(hook.modules()), report.engine, words(out, 1)])
        """,
        mode="",
    )
    assert found[0] == 0
    assert set(found[1].values()) == {0}
    assert found[2] == [2]


def test_calls_are_counted(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        # Each has memory of its own, for nothing puts their streams in order.
        module, out = Module(), [malloc(8) for _ in range(3)]
        mad = module.function("mad")
        launch(mad, stream(), u64(out[0], 1, 1))
        launch_extra(mad, stream(), struct.pack("<QQQ", out[1], 1, 1))
        graph = capture(lambda s: launch_with(mad, s, u64(out[2], 1, 1), []))
        replay(graph, times=3)
        answer(hook.report().engine)
        """,
    )
    counts = {k: found[k] for k in ("launches", "captures", "graph_launches", "instantiations", "module_loads")}
    assert counts == {"launches": 3, "captures": 1, "graph_launches": 3, "instantiations": 1, "module_loads": 1}
