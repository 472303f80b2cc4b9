# SPDX-License-Identifier: Apache-2.0
"""What a captured function returned comes back as it was: containers, views, and who shares memory with whom."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.torch import outputs  # noqa: E402
from foundryd.errors import ArchiveFormatError, CaptureError  # noqa: E402

CPU = torch.device("cpu")


def through_an_archive(value):
    """Encoded, packed as an archive's index is, and decoded; the memory stays where it is."""
    return outputs.decode(msgpack.unpackb(msgpack.packb(outputs.encode(value, CPU))), CPU)


def assert_same_view(made, tensor):
    assert made.shape == tensor.shape
    assert made.stride() == tensor.stride()
    assert made.storage_offset() == tensor.storage_offset()
    assert made.dtype == tensor.dtype
    assert made.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert made.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


@st.composite
def views(draw, base):
    """Any strided view of ``base``: overlapping, transposed, broadcast, empty."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [draw(st.integers(0, 7)) for _ in shape]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if reach >= base.numel():
        strides, reach = [0] * len(shape), 0
    offset = draw(st.integers(0, base.numel() - 1 - reach))
    return base.as_strided(shape, strides, offset)


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64)


@settings(deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_views_keep_shape_strides_and_offset_over_the_same_memory(data, dtype):
    base = torch.zeros(64, dtype=dtype)
    several = data.draw(st.lists(views(base), min_size=1, max_size=4))
    for made, view in zip(through_an_archive(several), several, strict=True):
        assert_same_view(made, view)


def test_outputs_that_shared_a_storage_share_one_again():
    base, other = torch.arange(12.0), torch.zeros(3)
    left, right, apart = through_an_archive((base[:8], base.view(3, 4).t(), other))
    assert left.untyped_storage()._cdata == right.untyped_storage()._cdata
    assert left.untyped_storage()._cdata != apart.untyped_storage()._cdata
    base[4] = 99.0  # second row, first column
    assert left[4] == 99.0
    assert right[0, 1] == 99.0


def test_tensors_without_elements_come_back_with_their_form():
    for empty in (torch.empty(0), torch.empty(3, 0, 2), torch.ones(4)[4:], torch.empty(2, 0, dtype=torch.int64).t()):
        (made,) = through_an_archive([empty])
        assert (made.shape, made.stride(), made.dtype) == (empty.shape, empty.stride(), empty.dtype)


def test_a_scalar_tensor_stays_a_tensor_and_a_number_a_number():
    tensor = torch.tensor(2.5)
    made = through_an_archive({"tensor": tensor, "number": 2.5, "flag": True, "text": "x", "none": None})
    assert made["tensor"].shape == ()
    assert float(made["tensor"]) == 2.5
    assert (made["number"], made["flag"], made["text"], made["none"]) == (2.5, True, "x", None)


numbers = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5)
trees = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(trees)
def test_nested_containers_keep_their_kinds_and_order(tree):
    made = through_an_archive(tree)
    assert repr(made) == repr(tree)


def test_a_default_dictionary_keeps_its_default():
    tensor = torch.ones(1)
    made = through_an_archive(defaultdict(list, {"a": [tensor]}))
    assert made["absent"] == []
    assert_same_view(made["a"][0], tensor)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.max(x, 0),
        lambda x: torch.sort(x),
        lambda x: torch.topk(x, 2),
        lambda x: torch.aminmax(x),
        lambda x: torch.linalg.qr(x),
        lambda x: torch.linalg.svd(x),
    ],
    ids=["max", "sort", "topk", "aminmax", "linalg.qr", "linalg.svd"],
)
def test_named_results_keep_their_names(operation):
    result = operation(torch.arange(9.0).view(3, 3) % 5)
    made = through_an_archive({"nested": [result]})["nested"][0]
    assert type(made) is type(result)
    for mine, theirs in zip(made, result, strict=True):
        assert_same_view(mine, theirs)


def test_a_parameter_comes_back_as_a_tensor_over_its_memory():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    assert_same_view(through_an_archive(weight), weight.data)


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        ({"a": [{1, 2}]}, "set"),
        (b"bytes", "bytes"),
        (1 + 2j, "complex"),
        (Pair(1, 2), "Pair"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugate"),
    ],
    ids=["object", "set", "bytes", "complex", "namedtuple", "sparse", "conjugate"],
)
def test_what_cannot_be_made_again_is_refused_by_name(value, named):
    with pytest.raises(CaptureError, match=named):
        outputs.encode(value, CPU)


def test_a_tensor_on_another_device_is_refused_with_both_devices():
    with pytest.raises(CaptureError, match="on cpu and its graph runs on cuda:1"):
        outputs.encode([torch.ones(1)], torch.device("cuda", 1))
    with pytest.raises(CaptureError, match="on meta"):
        outputs.encode(torch.max(torch.ones(2, 2, device="meta"), 0), CPU)


def described():
    return outputs.encode({"a": torch.arange(4.0), "b": torch.sort(torch.arange(3))}, CPU)


def _without_leaves(d):
    del d["leaves"]


def _another_storage(d):
    d["leaves"][0]["storage"] += 8


def _too_far(d):
    d["leaves"][0]["offset"] = 1 << 20


def _no_such_dtype(d):
    d["leaves"][0]["dtype"] = "float3"


def _no_such_result(d):
    d["leaves"][1]["result"] = "nothing"


def _one_leaf_less(d):
    d["leaves"].pop()


def _no_tree(d):
    d["tree"] = "[1, {"


DAMAGES = (_without_leaves, _another_storage, _too_far, _no_such_dtype, _no_such_result, _one_leaf_less, _no_tree)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__.strip("_"))
def test_a_damaged_description_is_refused(damage):
    broken = described()
    outputs.decode(broken, CPU)
    damage(broken)
    with pytest.raises(ArchiveFormatError, match="capture again"):
        outputs.decode(broken, CPU)
