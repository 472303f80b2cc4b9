# SPDX-License-Identifier: Apache-2.0
"""The proofs' kernels against NumPy, on whichever driver this process finds: prints what was compared, as JSON.

``survey``, ``put`` and ``judge`` get random bytes with single-byte differences, in chunks of odd lengths.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from foundryd.capture.device import CHUNK, MemoryKernels, Pool, chunk_dtype, judge_dtype, put_dtype
from foundryd.capture.snapshots import Mutation
from foundryd.session.driver import call, software_driver

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 255, 256, 1023, 1024, 2049, 4100, 65521, 65533, CHUNK - 1, CHUNK)
MUTATIONS = (Mutation(shift=True), Mutation(flip=True), Mutation(fill=0x5A))


class Device:
    """Slots of one chunk, half of them in pinned host memory."""

    def __init__(self) -> None:
        self.pools = [Pool(lambda: (1 << 24, 0)), Pool(lambda: (0, 1 << 24))]
        self.count = 0

    def put(self, data: np.ndarray, *, pinned: bool | None = None) -> int:
        """A slot that begins with ``data``; what is behind it is noise."""
        self.count += 1
        address = int(self.pools[self.count % 2 if pinned is None else pinned].take(1)[0])
        whole = np.random.default_rng(self.count).integers(0, 256, CHUNK, np.uint8)
        whole[: len(data)] = data
        call("cuMemcpyHtoD", address, whole.ctypes.data, CHUNK)
        return address

    def get(self, address: int, size: int = CHUNK) -> np.ndarray:
        out = np.empty(size, np.uint8)
        call("cuMemcpyDtoH", out.ctypes.data, address, size)
        return out

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


def words_of(data: np.ndarray) -> np.ndarray:
    return np.concatenate([data, np.zeros(-len(data) % 8, np.uint8)]).view(np.uint64)


def digest(data: np.ndarray) -> int:
    words = words_of(data)
    x = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + words
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(29)
    return int(x.sum(dtype=np.uint64))


def alike(data: np.ndarray) -> bool:
    """Whether the bytes repeat the first eight."""
    first = words_of(data)[:1].view(np.uint8)
    return bool((np.resize(first, len(data)) == data).all())


def check_survey(kernels: MemoryKernels, device: Device, draw: np.random.Generator) -> int:
    samples = []
    for size in LENGTHS:
        plain = draw.integers(0, 256, size, np.uint8)
        samples.append(plain)
        for at in {0, size - 1, int(draw.integers(size))}:
            other = plain.copy()
            other[at] ^= 1 << int(draw.integers(8))
            samples.append(other)
        repeated = np.resize(draw.integers(0, 256, 8, np.uint8), size)
        samples += [repeated, np.zeros(size, np.uint8)]
        if size > 8:
            repeated = repeated.copy()
            repeated[-1] ^= 0x80
            samples.append(repeated)
    low, high = 0x600000000000, 0x600000001000
    for value in (low - 1, low, high - 1, high):
        data = draw.integers(0, 256, 4101, np.uint8)
        data[4088:4096] = np.frombuffer(np.uint64(value).tobytes(), np.uint8)
        samples.append(data)
    rows = np.zeros(len(samples), chunk_dtype)
    rows["address"] = [device.put(data) for data in samples]
    rows["bytes"] = [len(data) for data in samples]
    kernels.watch(rows)
    seen = kernels.survey(low, high)
    assert seen.digest.tolist() == [digest(data) for data in samples]
    assert seen.mixed.tolist() == [not alike(data) for data in samples]
    assert seen.first.tolist() == [int(words_of(data)[0]) for data in samples]
    whole = [data[: len(data) // 8 * 8].view(np.uint64) for data in samples]
    assert seen.pointers.tolist() == [bool(((w >= low) & (w < high)).any()) for w in whole]
    assert seen.pointers.tolist()[-4:] == [False, True, True, False]
    assert (kernels.digests() == seen.digest).all()
    return len(samples)


def check_put(kernels: MemoryKernels, device: Device, draw: np.random.Generator) -> int:
    compared = 0
    for mutation in (Mutation(), *MUTATIONS):
        rows = np.zeros(2 * len(LENGTHS), put_dtype)
        wanted = []
        for row, size in zip(rows, [*LENGTHS, *LENGTHS], strict=True):
            data, before = draw.integers(0, 256, size, np.uint8), draw.integers(0, 256, CHUNK, np.uint8)
            row["to"], row["bytes"] = device.put(before, pinned=False), size
            filled = len(wanted) >= len(LENGTHS) or mutation.fill is not None
            word = draw.integers(0, 1 << 63, 1, np.uint64)
            changed = mutation.of_words(word, np.array([size], np.uint64))
            row["from"], row["word"] = 0 if filled else device.put(data), changed[0]
            wanted.append(np.concatenate([
                np.resize(changed.view(np.uint8), size) if filled else mutation.of(data), before[size:]
            ]))  # fmt: skip
        kernels.put(rows, shift=mutation.shift, flip=int(mutation.flip))
        for row, whole in zip(rows, wanted, strict=True):
            assert (device.get(int(row["to"])) == whole).all(), (mutation, int(row["bytes"]))
            compared += 1
    return compared


def allowed(after: np.ndarray, plain: np.ndarray, start: np.ndarray, changed: np.ndarray) -> bool:
    return bool(((after == plain) | ((plain == start) & (after == changed))).all())


def check_judge(kernels: MemoryKernels, device: Device, draw: np.random.Generator) -> list[int]:
    verdicts = [0, 0]
    for mutation in MUTATIONS:
        for size in LENGTHS:
            for filled, written in ((False, False), (False, True), (True, True), (True, False)):
                word = draw.integers(0, 1 << 63, 1, np.uint64)
                start = np.resize(word.view(np.uint8), size) if filled else draw.integers(0, 256, size, np.uint8)
                other = mutation.of_words(word, np.array([size], np.uint64))
                from_word = filled or mutation.fill is not None
                changed = np.resize(other.view(np.uint8), size) if from_word else mutation.of(start)
                plain = np.where(draw.random(size) < 0.5, draw.integers(0, 256, size, np.uint8), start)
                plain = plain if written else start
                kept = np.where(draw.random(size) < 0.5, changed, plain)
                good = np.where(plain == start, kept, plain)
                bad = good.copy()
                bad[draw.integers(size)] ^= 1 << int(draw.integers(8))
                for after in (good, bad):
                    row = np.zeros(1, judge_dtype)
                    row["after"], row["plain"] = device.put(after, pinned=False), device.put(plain) if written else 0
                    row["start"] = 0 if filled else device.put(start)
                    row["changed"] = 0 if from_word else row["start"]
                    row["bytes"], row["start_word"], row["changed_word"] = size, word[0], other[0]
                    verdict = kernels.judge(row, shift=mutation.shift, flip=int(mutation.flip))
                    assert verdict == allowed(after, plain, start, changed), (mutation, size, filled, written)
                    verdicts[verdict] += 1
    return verdicts


def main() -> None:
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    draw, device = np.random.default_rng(int(sys.argv[1])), Device()
    with MemoryKernels() as kernels:
        result = {
            "software": software_driver(),
            "surveyed": check_survey(kernels, device, draw),
            "put": check_put(kernels, device, draw),
            "judged": check_judge(kernels, device, draw),
        }
        device.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
