#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""A small language model to convert: a Llama of 12M parameters, trained on the source code of installed packages.

Nothing is downloaded, and an interrupted run resumes from its last checkpoint:

    python benchmarks/python_language_model.py python-lm --minutes 60

The model is saved as transformers does. Whole files are held out, see `experiments/language_data.py`; the first of
them are `held_out.txt` in its directory.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mhla_hf.utils.files import atomic_file


# The repository is not on the path of a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.experiments.language_data import END, CorpusOptions, load_corpus


VOCABULARY = 8192
CONTEXT = 256
BATCH = 8
WARMUP = 50
DECAY_SHARE = 0.5
MATRIX_RATE = 4e-3
OTHER_RATE = 2e-3
CHECKPOINT_EVERY = 100
HELD_OUT_BYTES = 400_000


def prepare(directory: Path, megabytes: float) -> tuple[PreTrainedTokenizerFast, torch.Tensor]:
    """Tokenizer and `held_out.txt`, kept in the directory, and training tokens, kept beside it."""
    options = CorpusOptions(megabytes=megabytes, vocabulary=VOCABULARY, tokenizer_megabytes=megabytes / 4)
    corpus = load_corpus(directory.with_name(f"{directory.name}-corpus"), options)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer, eos_token=END, bos_token=END, pad_token=END)
    tokenizer.save_pretrained(directory)
    with atomic_file(directory / "held_out.txt") as temporary:
        text = "\n\n".join(corpus.held_out_text()).encode()[:HELD_OUT_BYTES]
        temporary.write_text(text.decode(errors="ignore"), encoding="utf-8")
    print(
        f"{corpus.facts['training_megabytes']:,.0f} MB of text to train on, {corpus.facts['megabytes_found']:,.0f} MB "
        "found"
    )
    return tokenizer, torch.from_numpy(corpus.training.astype(np.int32))


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


def main(options: Sequence[str] | None = None) -> None:
    """Runs the training; `options` are those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="time for the training itself")
    parser.add_argument("--megabytes", type=float, default=40.0, help="how much text")
    arguments = parser.parse_args(options)
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
