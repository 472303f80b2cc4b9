# SPDX-License-Identifier: Apache-2.0
"""A vLLM that starts, is captured and ends: ``python -m foundryd.engines.vllm.capture``.

It takes the arguments of ``vllm serve``.
``vllm serve`` itself never ends, and its ranks start one another; a capture has one process, which is one rank.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from foundryd.errors import FoundrydError, UsageError
from foundryd.rankpatch.mesh import Mesh
from foundryd.settings import Mode, Settings, settings


def environment(config: Settings) -> dict[str, str]:
    """Variables of a vLLM in one process that is one rank; raises ``UsageError`` outside of a capture."""
    if config.mode is not Mode.CAPTURE:
        raise UsageError(
            "this only captures: start it as foundryd capture -o FILE --variant tp=1 -- python -m "
            "foundryd.engines.vllm.capture MODEL"
        )
    # Nobody listens at the address: the world of a capture has no peers.
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    if config.world_size > 1:
        # vLLM keeps compiled models by rank, each for the device of that rank.  Here every rank has the first device,
        # and what is compiled for it fails on another ("invalid argument" at its first launch).
        variables["VLLM_CACHE_ROOT"] = os.path.join(_cache_root(os.environ), "foundryd-capture")
    return variables


def _cache_root(environ: Mapping[str, str]) -> str:
    """Where vLLM keeps what it compiled."""
    default = os.path.join(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm")
    return os.path.expanduser(environ.get("VLLM_CACHE_ROOT") or default)


def start(arguments: Sequence[str], config: Settings) -> Any:
    """The engine that these arguments of ``vllm serve`` describe; its graphs are recorded when this returns."""
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    importlib.import_module("vllm.entrypoints.openai.cli_args").make_arg_parser(parser)
    parsed = parser.parse_args(list(arguments))
    if parsed.model_tag:
        parsed.model = parsed.model_tag
    engine_arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs.from_cli_args(parsed)
    fit(engine_arguments, Mesh.parse(config.variant))
    if config.world_size > 1:
        engine_arguments.distributed_executor_backend = "external_launcher"
    # Defaults such as max_num_batched_tokens follow from who uses the engine.
    context = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    engine = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
    return engine.from_engine_args(engine_arguments, usage_context=context)


def fit(arguments: Any, mesh: Mesh) -> None:
    """Lets ``EngineArgs`` describe a server's replicas as a capture has them.

    Those of a model with experts are one world, whose ranks count themselves.  Those of a dense model share nothing:
    one of them is captured, as if it were alone.  Raises ``UsageError`` if the mesh is of other sizes.
    """
    if arguments.data_parallel_size > 1:
        if not arguments.create_model_config().is_moe:
            arguments.data_parallel_size = 1
        # Which replicas a server has here, and who spreads requests over them.
        arguments.data_parallel_rank = arguments.data_parallel_start_rank = arguments.data_parallel_size_local = None
        arguments.data_parallel_hybrid_lb = arguments.data_parallel_external_lb = False
    fits = Mesh(pp=arguments.pipeline_parallel_size, dp=arguments.data_parallel_size, tp=arguments.tensor_parallel_size)
    if (mesh.pp, mesh.dp, mesh.ep, mesh.tp) != (fits.pp, fits.dp, fits.ep, fits.tp):
        raise UsageError(
            f"--variant is {mesh} and with these arguments vLLM's world is {fits}, over all of whose ranks experts are "
            f"spread: capture with --variant {fits}, or with other arguments"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Captures, and ends with exit code 0 if the recording was written."""
    try:
        config = settings()
        os.environ |= environment(config)
        start(sys.argv[1:] if arguments is None else arguments, config)
    except FoundrydError as error:
        print(f"foundryd: {error}", file=sys.stderr)
        return 1
    if config.recording is not None and not config.recording.exists():
        print("foundryd: vLLM started without being captured: see its log above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
