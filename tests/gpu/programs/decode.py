# SPDX-License-Identifier: Apache-2.0
"""One rank that captures, restores or runs natively, decodes, and reports digests of all that its graphs put out.

Digests of two runs are equal exactly if every output byte of every replay was.  The last line of standard output is
the report, one JSON object.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402  (the imports below are part of what is timed)
import hashlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from engine import Engine, add_arguments  # noqa: E402
from torch import Tensor  # noqa: E402

PROMPT = 4  # tokens that are given before a request decodes its own
EAGER_EVERY = 3  # replays between two eager collectives


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, in the order of its elements."""
    return tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()


def digest(outputs: dict[str, Tensor]) -> str:
    """Of every output, names included."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(outputs):
        state.update(name.encode())
        state.update(raw(outputs[name]))
    return state.hexdigest()


class Run:
    """Replays of an engine and what came out of them, a list of digests for each batch size."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.digests: dict[int, list[str]] = {batch: [] for batch in engine.batch_sizes}
        self.eager = 0
        self.wrong_eager = 0
        self._count = 0
        # Different requests on every rank but along tp, where ranks share theirs.
        seed = engine.config.seed + 1000 * (engine.rank // engine.mesh.tp)
        self._inputs = torch.Generator().manual_seed(seed)

    def decode(self, steps: int) -> None:
        """Each request is a prompt, then what the model makes of it; the batch changes its size at every replay.

        A request keeps its place and its own length, so one sits out the replays of batches that are too small.
        """
        engine, c = self.engine, self.engine.config
        longest = steps * len(engine.batch_sizes)
        if longest > c.max_seq:
            raise ValueError(f"{longest} replays need as many positions and --max-seq is {c.max_seq}: raise it")
        engine.reset()
        prompts = torch.randint(c.vocab, (c.max_batch, PROMPT), generator=self._inputs).to(engine.device)
        sizes = list(engine.batch_sizes)
        for step in range(steps):
            turn = step % len(sizes)
            for batch in [*sizes[turn:], *sizes[:turn]]:
                self._feed(batch, prompts)
                self._replay(batch)
                engine.positions[:batch].add_(1)

    def stress(self, replays: int) -> None:
        """Replays of each graph with other tokens and places each time, whatever the caches hold by then."""
        engine, c = self.engine, self.engine.config
        for i in range(replays):
            for batch in engine.batch_sizes:
                engine.tokens.copy_(torch.randint(c.vocab, (c.max_batch,), generator=self._inputs))
                engine.positions.copy_(torch.randint(c.max_seq, (c.max_batch,), generator=self._inputs))
                self._replay(batch)
            if engine.generator is not None and i % 2:
                engine.generator.manual_seed(i)

    def _feed(self, batch: int, prompts: Tensor) -> None:
        positions, tokens = self.engine.positions[:batch], self.engine.tokens[:batch]
        given = prompts[:batch].gather(1, positions.clamp(max=PROMPT - 1)[:, None])[:, 0]
        tokens.copy_(torch.where(positions < PROMPT, given, tokens))

    def _replay(self, batch: int) -> None:
        self.digests[batch].append(digest(self.engine.replay(batch)))
        self._count += 1
        if self._count % EAGER_EVERY == 0:
            self._eager_collective()

    def _eager_collective(self) -> None:
        """A collective between replays, on the communicator of all ranks and on that of tp, with a known sum."""
        for size, group in ((self.engine.world, None), (self.engine.mesh.tp, self.engine.axes["tp"].group)):
            if size > 1:
                ones = torch.ones(1024, device=self.engine.device)
                dist.all_reduce(ones, group=group)
                self.eager += 1
                self.wrong_eager += int(not bool((ones == size).all()))


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Runs it all."""
    engine = Engine(args)
    engine.timings["imports"] = (IMPORTED - STARTED) * 1e3
    engine.prepare()
    ready = (time.perf_counter() - STARTED) * 1e3
    run = Run(engine)
    if not engine.capturing:
        with engine.timings.phase("decode"):
            run.decode(args.steps)
        with engine.timings.phase("replays"):
            run.stress(args.replays)
    result = engine.figures() | {
        "ready_ms": ready,
        "digests": {str(batch): values for batch, values in run.digests.items()},
        "digest": hashlib.blake2b(json.dumps(run.digests).encode(), digest_size=16).hexdigest(),
        "eager_collectives": run.eager,
        "eager_collectives_wrong": run.wrong_eager,
    }
    engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=16, help="replays of each batch size that decode")
    parser.add_argument("--replays", type=int, default=0, help="more replays of each batch size, with random inputs")
    parser.add_argument("--json", help="where to write the report too; {rank} becomes the rank")
    args = parser.parse_args()
    result = report(args)
    text = json.dumps(result)
    if args.json:
        Path(args.json.replace("{rank}", str(result["rank"]))).write_text(text)
    print(text, flush=True)


IMPORTED = time.perf_counter()

if __name__ == "__main__":
    main()
