#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one Wan transformer forward, softmax against MHLA, random weights, in the same run.

On a GPU the default is the size of Wan2.1-T2V-1.3B at 81 frames of 480 × 832 (latents 21 × 60 × 104) in bfloat16:

    python benchmarks/wan_forward.py --json wan_forward.json

On a CPU a small model runs, which shows that the program works and nothing about speed at the real size.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from mhla_hf import MHLAWanTransformer3DModel


# Wan-AI/Wan2.1-T2V-1.3B-Diffusers, transformer/config.json.
WAN_1_3B = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
    "text_dim": 4096,
}
SMALL = {"num_attention_heads": 2, "attention_head_dim": 48, "ffn_dim": 256, "num_layers": 2, "text_dim": 64}


def main() -> None:
    """Runs both models and prints a table."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latents", default="21,60,104" if on_gpu else "5,20,26", help="frames,height,width")
    parser.add_argument("--blocks", default="3,5,10", help="number of blocks: frames,height,width")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    latents = tuple(int(size) for size in arguments.latents.split(","))
    blocks = tuple(int(count) for count in arguments.blocks.split(","))
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    sizes = WAN_1_3B if on_gpu else SMALL

    generator = torch.Generator(device).manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 16, *latents, generator=generator, device=device, dtype=dtype),
        "timestep": torch.full((1,), 500.0, device=device),
        "encoder_hidden_states": torch.randn(
            1, 512, sizes["text_dim"], generator=generator, device=device, dtype=dtype
        ),
    }
    makers = {
        "softmax": lambda: WanTransformer3DModel(**sizes),
        "mhla": lambda: MHLAWanTransformer3DModel(**sizes, mhla={"blocks": blocks}),
    }
    rows = {name: measure(make, inputs, device, dtype, arguments.repeats) for name, make in makers.items()}
    tokens = latents[0] * (latents[1] // 2) * (latents[2] // 2)
    for name, row in rows.items():
        memory = f"{row['peak_memory_bytes'] / 1e9:.2f} GB" if on_gpu else "not measured on a CPU"
        print(f"{name:8s} {row['milliseconds']:10.1f} ms   peak memory {memory}   finite {row['finite']}")
    ratio = rows["softmax"]["milliseconds"] / rows["mhla"]["milliseconds"]
    print(f"{tokens} tokens: softmax / MHLA = {ratio:.2f}")
    if arguments.json:
        machine = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
        facts = {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__, "model": sizes}
        facts.update(latents=latents, blocks=blocks, tokens=tokens, dtype=str(dtype), results=rows)
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")


def measure(make, inputs, device, dtype, repeats):
    """Median milliseconds of a forward after one warm-up, peak memory in bytes, and whether the output is finite."""
    torch.manual_seed(0)
    with torch.device(device):
        model = make().to(dtype).eval()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            _synchronize(device)
            started = time.perf_counter()
            output = model(**inputs, return_dict=False)[0]
            _synchronize(device)
            times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    finite = bool(output.isfinite().all())
    del model, output
    if device == "cuda":
        torch.cuda.empty_cache()
    return {"milliseconds": 1e3 * statistics.median(times[1:]), "peak_memory_bytes": peak, "finite": finite}


def _synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
