# SPDX-License-Identifier: Apache-2.0
"""The store is a library: a rank can restore from a file."""

import os

import pytest

from foundryd.errors import ArchiveDigestError, ArchiveError, NotInArchiveError
from foundryd.session.client import attach_file


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_file_gives_what_a_daemon_would(start, archive, join, tiny):
    before = descriptors()
    with attach_file(archive, variant="ep=8", rank=3, tools=tiny.TOOLS) as alone:
        start(archive)
        served = join(3)
        assert bytes(alone.archive) == bytes(served.archive)
        assert bytes(alone.plan) == bytes(served.plan)
        assert (alone.name, alone.digest, alone.variant) == (served.name, served.digest, served.variant)
        assert alone.archive.readonly
        assert alone.lease is None
        assert alone.daemon is None
        assert not alone.lost
        served.close()
    assert descriptors() <= before + 1  # the test's handle on the daemon's log is none of ours


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda path: path.unlink(), ArchiveError),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), ArchiveDigestError),
        (lambda path: None, NotInArchiveError),
    ],
)
def test_a_failure_is_typed_and_leaves_nothing(archive, tiny, change, kind):
    change(archive)
    before = descriptors()
    with pytest.raises(kind):
        attach_file(archive, variant="ep=8", rank=99, tools=tiny.TOOLS)
    assert descriptors() == before
