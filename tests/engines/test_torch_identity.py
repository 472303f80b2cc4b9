# SPDX-License-Identifier: Apache-2.0
"""Which PyTorch and which Triton an archive was captured with, and that another is refused by name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.archive.identity import MachineIdentity, check  # noqa: E402
from foundryd.engines.torch import identity  # noqa: E402
from foundryd.engines.torch.identity import TorchFacts  # noqa: E402
from foundryd.errors import IdentityMismatch  # noqa: E402


@pytest.fixture
def triton(monkeypatch):
    """Says which Triton is installed, or None for none."""

    def install(wanted):
        def version(name):
            assert name == "triton"
            if wanted is None:
                raise PackageNotFoundError(name)
            return wanted

        monkeypatch.setattr(identity, "version", version)

    return install


def here():
    return MachineIdentity.collect([TorchFacts()], environ={})


def test_torch_is_named_with_the_cuda_that_it_was_built_for(triton, monkeypatch):
    triton("3.5.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert TorchFacts().identity_facts() == {"torch": "2.11.0+cu130 (CUDA 13.0)", "triton": "3.5.0"}


def test_without_triton_there_is_no_fact_of_it(triton):
    triton(None)
    assert set(TorchFacts().identity_facts()) == {"torch"}


def test_the_same_pytorch_is_accepted(triton):
    triton("3.5.0")
    check(here().fields, here())


@pytest.mark.parametrize(("name", "value"), [("__version__", "2.99.1"), ("cuda", "99.0")])
def test_another_pytorch_is_refused_with_both_versions(triton, monkeypatch, name, value):
    triton("3.5.0")
    archived = here()
    monkeypatch.setattr(torch if name == "__version__" else torch.version, name, value)
    with pytest.raises(IdentityMismatch) as caught:
        check(archived.fields, here(), "model")
    assert f"torch is {here().fields['torch'].value}" in str(caught.value)
    assert f"the archive has {archived.fields['torch'].value}" in str(caught.value)


@pytest.mark.parametrize("found", ["3.6.0", None])
def test_another_triton_or_none_is_refused(triton, found):
    triton("3.5.0")
    archived = here()
    triton(found)
    with pytest.raises(IdentityMismatch, match=f"triton is {found or 'not set'} and the archive has 3.5.0"):
        check(archived.fields, here())
