# SPDX-License-Identifier: Apache-2.0
"""Damages archives in every way we could think of, and does with each what a daemon and a rank do.

    python tests/archive/damage.py ARCHIVE --count 10000 --seed 1

A damage is right if a typed error refuses it.  Where digests were made to fit, nonsense may also make sense: then all
of it has to work, from opening to every rank's patched blocks.  Anything else is a failure: another exception, more
than ``MEMORY`` bytes, more than ``DEADLINE`` seconds, or a byte that changed and nobody noticed.  The number of the
damage reproduces it (``--first N --count 1``).  The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import damages
import numpy as np

from foundryd.archive.inflate import inflate, inflated_size
from foundryd.archive.members import TemplateReader, block_bytes
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import verify
from foundryd.errors import ArchiveError, FoundrydError, NotInArchiveError
from foundryd.rankpatch.plan import Plan, compute_plan

MEMORY = 1 << 30  # bytes of addresses beyond what the process has before the first damage
DEADLINE = 20.0  # seconds for one damage
RANKS = 3  # of each variant, whose plans are made


class UndetectedError(Exception):
    """A change that somebody has to notice went through."""


@dataclass
class Report:
    """What became of the damages."""

    refused: Counter[str] = field(default_factory=Counter)
    made_sense: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def load(data: bytes) -> int:
    """What the daemon does with a file, in its order; a memfd with the inflated archive, which the caller closes.

    Raises ``ArchiveError`` if it does not serve it.
    """
    with ArchiveReader(data, name="the damaged archive") as reader:
        assert len(reader.content_digest) == 64
        verify(reader)
        size = inflated_size(reader)
        fd = os.memfd_create("damaged", os.MFD_CLOEXEC)
        try:
            assert inflate(reader, fd) == size == os.fstat(fd).st_size
        except BaseException:
            os.close(fd)
            raise
        return fd


def restore(reader: ArchiveReader) -> None:
    """What ranks do with an archive that was verified, short of calling a driver."""
    for variant in reader.index.variants:
        readers = [TemplateReader(reader, template) for template in variant.templates]
        for place, member in enumerate(variant.members):
            found = readers[member.template]
            found.graph(found.template.members.index(place))
        ranks = variant.rank_class.ranks
        for rank in {ranks[0], ranks[len(ranks) // 2], ranks[-1]} if len(ranks) > RANKS else ranks:
            try:
                plan = Plan.from_buffer(compute_plan(reader, variant.name, rank).to_bytes())
            except ArchiveError as error:
                if isinstance(error, NotInArchiveError):  # the code of a rank that was not captured, for example
                    continue
                raise UndetectedError(f"verified, and the plan of rank {rank} is impossible: {error}") from error
            except FoundrydError:  # rules that follow the local rank, which the caller has to know
                continue
            for number in range(len(variant.blocks)):
                data = block_bytes(reader, variant, number)
                plan.apply(number, data)


def judge(damage: damages.Damage, report: Report) -> None:
    """Tries one damaged file and notes what came of it."""
    report.kinds[damage.kind] += 1
    try:
        fd = load(damage.data)
    except ArchiveError as error:
        text = str(error)
        if not text or "\n" in text or len(text) > 4000:
            raise UndetectedError(f"the refusal is no sentence: {text[:200]!r}") from error
        report.refused[type(error).__name__] += 1
        return
    try:
        if damage.always_refused:
            raise UndetectedError("the archive is accepted")
        with ArchiveReader.from_fd(fd, trusted=True) as sealed:
            restore(sealed)
        report.made_sense[damage.kind] += 1
    finally:
        os.close(fd)


def bound_memory() -> None:
    """No allocation beyond ``MEMORY`` succeeds from here on."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(archive: bytes, first: int, count: int, seed: int, seconds: float) -> Report:
    """Tries damages ``first`` to ``first + count``, fewer if ``seconds`` are over."""
    report = Report()
    whole = damages.Parts.of(archive)
    fd = load(archive)
    with ArchiveReader.from_fd(fd, trusted=True) as sealed:
        restore(sealed)
    os.close(fd)
    bound_memory()
    end = time.monotonic() + seconds
    for number in range(first, first + count):
        began = time.monotonic()
        if began > end:
            break
        damage = damages.make(whole, random.Random(f"{seed}/{number}"))
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        try:
            judge(damage, report)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            report.failures.append(
                f"damage {number} ({damage.what}): {type(error).__name__}: {error} "
                f"in {Path(where.filename).name}:{where.lineno}"
            )
        faulthandler.cancel_dump_traceback_later()
        report.slowest_s = max(report.slowest_s, time.monotonic() - began)
    return report


def main() -> int:
    """Exit status 1 if a damage failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as many")
    options = parser.parse_args()
    faulthandler.enable()
    np.seterr(all="raise")
    report = run(options.archive.read_bytes(), options.first, options.count, options.seed, options.seconds)
    for failure in report.failures[:50]:
        print(failure)
    print(
        json.dumps(
            {
                "damages": sum(report.kinds.values()),
                "kinds": dict(sorted(report.kinds.items())),
                "refused": dict(sorted(report.refused.items())),
                "made_sense": dict(sorted(report.made_sense.items())),
                "failures": len(report.failures),
                "slowest_ms": round(report.slowest_s * 1000, 1),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
        )
    )
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
