#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""A small language model to convert: a Llama of 12M parameters, trained on the source code of installed packages.

Nothing is downloaded, and an interrupted run resumes from its last checkpoint:

    python benchmarks/python_language_model.py python-lm --minutes 60

The model is saved as transformers does. The last files, `held_out.txt` in its directory, are not trained on.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mhla_hf.utils.files import atomic_file


PACKAGES = ("torch", "transformers", "diffusers", "accelerate", "peft", "sklearn", "scipy", "pandas", "matplotlib")
"""Beside the standard library; those that are not installed are left out."""

VOCABULARY = 8192
CONTEXT = 256
BATCH = 8
WARMUP = 50
DECAY_SHARE = 0.5
MATRIX_RATE = 4e-3
OTHER_RATE = 2e-3
CHECKPOINT_EVERY = 100
HELD_OUT_BYTES = 400_000
END = "<|endoftext|>"


def source_files(seed: int = 0) -> list[Path]:
    """Python files of the standard library and of `PACKAGES`, shuffled."""
    roots = [Path(sysconfig.get_path("stdlib")), *(Path(sysconfig.get_path("purelib")) / name for name in PACKAGES)]
    files = []
    for root in roots:
        files += [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.relative_to(root).parts]
    random.Random(seed).shuffle(files)
    return files


def texts(files: list[Path]) -> Iterator[str]:
    """Contents of the files, each once."""
    seen = set()
    for path in files:
        content = path.read_text(encoding="utf-8", errors="ignore")
        if len(content) > 200 and hash(content) not in seen:
            seen.add(hash(content))
            yield content


def train_tokenizer(training: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(training, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


def prepare(directory: Path, megabytes: float) -> tuple[PreTrainedTokenizerFast, torch.Tensor]:
    """Tokenizer and training tokens, kept in the directory."""
    tokens_file = directory / "tokens.pt"
    if tokens_file.exists():
        return PreTrainedTokenizerFast.from_pretrained(directory), torch.load(tokens_file, weights_only=True)
    directory.mkdir(parents=True, exist_ok=True)
    held_out, training, size = [], [], 0
    for text in texts(source_files()):
        if sum(map(len, held_out)) < HELD_OUT_BYTES:
            held_out.append(text)
            continue
        training.append(text)
        size += len(text)
        if size > megabytes * 1e6:
            break
    tokenizer = train_tokenizer(training[: len(training) // 4])
    (directory / "held_out.txt").write_text("\n\n".join(held_out)[:HELD_OUT_BYTES], encoding="utf-8")
    tokenizer.save_pretrained(directory)
    ids: list[int] = []
    for text in track(training, "Tokenise"):
        ids += [tokenizer.eos_token_id, *tokenizer(text, verbose=False)["input_ids"]]
    tokens = torch.tensor(ids, dtype=torch.int32)
    torch.save(tokens, tokens_file)
    return tokenizer, tokens


def build_model() -> LlamaForCausalLM:
    """The untrained model: 12 layers of width 256 with 4 heads, tied embeddings."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=12,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4 * CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def main() -> None:
    """Runs the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="time for the training itself")
    parser.add_argument("--megabytes", type=float, default=40.0, help="how much text")
    arguments = parser.parse_args()
    tokenizer, tokens = prepare(arguments.directory, arguments.megabytes)
    model = build_model()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = (MATRIX_RATE, OTHER_RATE)
    seconds, step = 0.0, 0
    checkpoint = arguments.directory / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, values in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(values)
        seconds, step = state["seconds"], state["step"]
    limit = 60 * arguments.minutes
    losses: list[float] = []
    while seconds < limit:
        started = time.monotonic()
        # By time, not by steps: how many there will be depends on the machine.
        factor = min(1.0, (step + 1) / WARMUP, (1.0 - seconds / limit) / DECAY_SHARE)
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts]).long()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        if not math.isfinite(loss.item()):
            raise ValueError(f"The loss is {loss.item()} at step {step}.")
        for optimizer, rate in zip(optimizers, rates):
            optimizer.zero_grad(set_to_none=True)
            optimizer.param_groups[0]["lr"] = rate * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        step += 1
        seconds += time.monotonic() - started
        if step % 20 == 0:
            print(f"step {step}, {seconds:.0f} s, loss {sum(losses[-20:]) / 20:.4f}", flush=True)
        if step % CHECKPOINT_EVERY == 0:
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "seconds": seconds,
                "step": step,
            }
            with atomic_file(checkpoint) as temporary:
                torch.save(state, temporary)
            model.save_pretrained(arguments.directory)
    model.save_pretrained(arguments.directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {step} steps, {step * BATCH * CONTEXT:,} tokens: {arguments.directory}")


if __name__ == "__main__":
    main()
