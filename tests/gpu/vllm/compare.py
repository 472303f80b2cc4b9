# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on one GPU: tokens and start of a restored engine against those of a native one.

It needs vLLM 0.22.1 (``pip install vllm==0.22.1``) and foundryd in one environment, and a GPU with FlashAttention::

    python tests/gpu/vllm/compare.py --out /tmp/vllm
    python tests/gpu/vllm/compare.py --out /tmp/vllm --steps restore       # again, from the archive that is there

Steps: ``warm`` fills the caches of compilers, ``native`` measures vLLM without foundryd's hook, ``capture`` makes the
archive (several starts of the engine), ``restore`` starts from it.  Each step keeps its result in the folder, and the
comparison is of all that is there: a run that is cut off goes on with ``--steps``.

The model has Qwen3's shapes and random weights, which are written once, so that no network is needed; ``--model`` takes
another.  64 prompts in batches of 1, 2, 5, 8, 16 and 32 are answered with 64 tokens each, greedily.  The exit code is 0
if every token is equal and the engine restored; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCHES = (1, 2, 5, 8, 16, 32)
TOKENS = 64
STEPS = ("warm", "native", "capture", "restore")
SHAPES = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write_model(folder: Path, layers: int) -> None:
    """Configuration and random weights; dummy weights would be too small for attention to matter."""
    import torch
    from safetensors.torch import save_file

    config: dict[str, Any] = {**SHAPES, "num_hidden_layers": layers, "max_window_layers": layers}
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (q, hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, q),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in shapes.items():
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        weights[name] = values.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def prompts(vocabulary: int) -> list[list[int]]:
    """The same ones in every run, of different lengths."""
    draw = random.Random(7)
    return [[draw.randrange(2, vocabulary) for _ in range(draw.randrange(3, 200))] for _ in range(sum(BATCHES))]


def engine(model: str, memory: float) -> Any:
    """The engine under test."""
    from vllm import LLM

    return LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=max(BATCHES),
        gpu_memory_utilization=memory,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"},
    )


def work(arguments: argparse.Namespace) -> None:
    """One start of the engine; outside of a capture also the answers, which go to a file."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    started = time.perf_counter()
    llm = engine(arguments.model, arguments.memory)
    init = time.perf_counter() - started
    if arguments.work == "capture":
        return
    vocabulary = int(json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"])
    waiting, answers = prompts(vocabulary), []
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    for size in BATCHES:
        batch, waiting = waiting[:size], waiting[size:]
        results = llm.generate([TokensPrompt(prompt_token_ids=p) for p in batch], sampling, use_tqdm=False)
        answers += [list(result.outputs[0].token_ids) for result in results]
    result = {"init_s": init, "generate_s": time.perf_counter() - started, "tokens": answers}
    (arguments.out / f"{arguments.work}.json").write_text(json.dumps(result))


def step(name: str, arguments: argparse.Namespace) -> None:
    """Runs one step in processes of its own; raises ``SystemExit`` with the end of its output if it fails."""
    out: Path = arguments.out
    program = [sys.executable, __file__, "--work", name, "--out", str(out), "--model", arguments.model]
    program += ["--memory", str(arguments.memory)]
    archive, foundryd = out / "model.foundry", [sys.executable, "-m", "foundryd.cli"]
    command = {
        "capture": [
            *(*foundryd, "capture", "-o", str(archive), "--variant", "tp=1", "--json"),
            *("--deadline", str(arguments.deadline), "--logs", str(out / "logs"), "--", *program),
        ],
        "restore": [*foundryd, "run", "--archive", str(archive), "--", *program],
    }.get(name, program)
    env = {key: value for key, value in os.environ.items() if not key.startswith("FOUNDRYD_")}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"FOUNDRYD_LOG": "info", "FOUNDRYD_STARTUP_REPORT": str(out / f"report-{name}")}
    log = out / f"{name}.log"
    started = time.monotonic()
    with log.open("wb") as sink:
        try:
            done = subprocess.run(
                command, env=env, stdout=sink, stderr=subprocess.STDOUT, timeout=arguments.timeout, check=False
            )
            failed = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failed = f"no end after {arguments.timeout:.0f} s"
    print(f"{name:8} {time.monotonic() - started:7.1f} s  {failed or 'done'}", flush=True)
    if failed:
        raise SystemExit(f"{name}: {failed}; the end of {log}:\n{log.read_text(errors='replace')[-6000:]}")


def load(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def summary(out: Path) -> dict[str, Any]:
    """The comparison of what is there."""
    native, restored = load(out / "native.json"), load(out / "restore.json")
    reports = {way: load(out / f"report-{way}" / "rank-0.json") for way in ("native", "restore")}
    pairs = list(zip(native.get("tokens", []), restored.get("tokens", []), strict=False))
    different = [i for i, (a, b) in enumerate(pairs) if a != b]
    first = {i: next(k for k, (x, y) in enumerate(zip(*pairs[i], strict=True)) if x != y) for i in different[:8]}
    return {
        "way": reports["restore"].get("way"),
        "fallback": reports["restore"].get("fallback"),
        "graphs": reports["restore"].get("graphs"),
        "kv_blocks": {way: report.get("kv_blocks") for way, report in reports.items()},
        "prompts": len(pairs),
        "equal": len(pairs) - len(different),
        "first_differences": first,
        "distinct_tokens": len({token for answer in native.get("tokens", []) for token in answer}),
        "init_s": {"native": native.get("init_s"), "restore": restored.get("init_s")},
        "generate_s": {"native": native.get("generate_s"), "restore": restored.get("generate_s")},
        "phases_ms": {way: report.get("phases_ms", {}) for way, report in reports.items()},
        "restore_ms": reports["restore"].get("restore_ms", {}),
        "archive_bytes": (out / "model.foundry").stat().st_size if (out / "model.foundry").exists() else None,
    }


def show(result: dict[str, Any]) -> None:
    """The table, and the same as one line of JSON."""
    native, restored = result["phases_ms"]["native"], result["phases_ms"]["restore"]
    print(f"\n{'phase':20}{'native ms':>12}{'restored ms':>14}")
    for name in {**native, **restored}:
        print(f"{name:20}{native.get(name, 0.0):12.1f}{restored.get(name, 0.0):14.1f}")
    for name, ms in result["restore_ms"].items():
        print(f"  restore {name:30}{ms:8.1f}")
    print(f"{result['equal']} of {result['prompts']} answers equal, {result['way']}, {result['fallback']}")
    print(json.dumps(result))


def main() -> int:
    """Runs the steps and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the model, the archive and results")
    parser.add_argument("--steps", default=",".join(STEPS), help="which, joined by commas")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--model", default="", help="the folder of another model")
    parser.add_argument("--memory", type=float, default=0.4, help="gpu_memory_utilization")
    parser.add_argument("--deadline", type=float, default=400, help="seconds of one launch of a capture")
    parser.add_argument("--timeout", type=float, default=3000, help="seconds of one step")
    parser.add_argument("--work", choices=STEPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.out = arguments.out.resolve()
    if not arguments.model:
        arguments.model = str(arguments.out / f"qwen3-{arguments.layers}")
        if not (Path(arguments.model) / "config.json").exists():
            write_model(Path(arguments.model), arguments.layers)
    steps = arguments.steps.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.error(f"{', '.join(sorted(unknown))} is no step: use {', '.join(STEPS)}")
    for name in steps:
        step(name, arguments)
    result = summary(arguments.out)
    show(result)
    good = result["way"] == "restored" and result["prompts"] == result["equal"] == sum(BATCHES)
    return 0 if good or "restore" not in steps else 1


if __name__ == "__main__":
    sys.exit(main())
