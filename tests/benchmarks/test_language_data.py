# SPDX-License-Identifier: Apache-2.0
"""Text and tokens of the language models, and their bits per byte."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.experiments import language_data
from benchmarks.experiments.language_data import (
    CorpusOptions,
    is_held_out,
    load_corpus,
)
from benchmarks.experiments.language_evaluation import (
    bits_by_position,
    long_file_windows,
)
from benchmarks.experiments.language_model import make_model, mhla_options, training_batch


pytestmark = pytest.mark.slow


OPTIONS = CorpusOptions(megabytes=None, held_out_megabytes=1.0, vocabulary=300, tokenizer_megabytes=0.02)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory, count=150):
    """Files with contents that name them, a few of them twice, one too short and one not UTF-8."""
    folder, files = tmp_path_factory.mktemp("files"), []
    for number in range(count):
        path = folder / f"{number}.py"
        path.write_text(f"# file {number}: ä € 🙂\n" + f"value_{number} = [{number}]\r\n" * 20, encoding="utf-8")
        files.append((path.name, path))
    for number in range(count):
        copy = folder / f"copy_{number}.py"
        copy.write_bytes(files[number][1].read_bytes())
        files.append((copy.name, copy))
    for name, content in (("short.py", b"x = 1\n"), ("latin.py", b"# \xe4\n" * 100)):
        (folder / name).write_bytes(content)
        files.append((name, folder / name))
    return files


@pytest.fixture(scope="module")
def corpus(files, tmp_path_factory):
    return load_corpus(tmp_path_factory.mktemp("corpus"), OPTIONS, files)


def test_held_out_files_are_not_trained_on(corpus, files):
    held_out = corpus.held_out_text()
    names = {name for name, _ in files if is_held_out(name)}
    contents = {path.read_bytes().decode() for name, path in files if name in names}
    # Copies of held-out files are not trained on either, whatever their names are.
    assert set(held_out) == contents and 0 < len(held_out) < 30
    training = corpus.tokenizer.decode(corpus.training.tolist(), skip_special_tokens=False).split("<|endoftext|>")[1:]
    assert set(training).isdisjoint(contents) and len(training) + len(held_out) == 150
    assert corpus.facts["training_files"] == len(training) and corpus.facts["files_found"] == 302


def test_bytes_of_tokens_are_those_of_the_text(corpus):
    for tokens, text in zip(corpus.held_out, corpus.held_out_text(), strict=True):
        assert corpus.token_bytes[tokens].sum() == len(text.encode())
    assert corpus.token_bytes[corpus.tokenizer.token_to_id(language_data.END)] == 0


def test_batches_see_every_token_once():
    tokens = np.arange(101, dtype=np.uint16)
    batches = [training_batch(tokens, 10, 2, 0, step) for step in range(5)]
    seen = torch.cat([batch[:, :-1].flatten() for batch in batches])
    assert sorted(seen.tolist()) == list(range(100))
    assert all(torch.equal(batch[:, 1:], batch[:, :-1] + 1) for batch in batches)
    again = torch.cat([training_batch(tokens, 10, 2, 0, step)[:, :-1].flatten() for step in range(5, 10)])
    assert sorted(again.tolist()) == list(range(100)) and not torch.equal(seen, again)
    assert torch.equal(training_batch(tokens, 10, 2, 0, 3), batches[3])
    with pytest.raises(ValueError, match="fewer than a context of 200"):
        training_batch(tokens, 200, 1, 0, 0)


def model(attention="softmax", **changes):
    options = {} if attention == "softmax" else mhla_options(64, **changes)
    sizes = {"width": 16, "layers": 2, "heads": 2, "intermediate": 24}
    return make_model(attention, options, vocabulary=300, context=64, seed=0, **sizes).eval()


def test_bits_per_byte_are_those_of_a_direct_computation(corpus):
    softmax, texts = model(), long_file_windows(corpus, 100, 3)
    found = bits_by_position(softmax, texts, corpus.token_bytes, dtype=torch.float32)
    bits, size = np.zeros(4), np.zeros(4)
    for text in texts:
        tokens = torch.from_numpy(text.astype(np.int64))
        with torch.no_grad():
            probabilities = softmax(tokens[None]).logits[0].softmax(-1)
        for position in range(100):
            target = int(tokens[position + 1])
            bucket = 0 if position < 16 else 1 if position < 32 else 2 if position < 64 else 3
            bits[bucket] -= math.log2(probabilities[position, target])
            size[bucket] += corpus.token_bytes[target]
    assert found["edges"] == [16, 32, 64, 100] and found["bytes"] == size.tolist()
    assert found["bits"] == pytest.approx(bits, abs=0.01)
    assert found["bits_per_byte"] == pytest.approx(bits.sum() / size.sum(), rel=1e-4)


def test_uniform_mixing_is_linear_attention():
    """MHLA that is not trained from uniform mixing weights is linear attention, at any length."""
    torch.manual_seed(0)
    tokens = torch.randint(300, (1, 200))
    with torch.no_grad():
        blocks = model("mhla")(tokens[:, :-1]).logits
        one_block = model("mhla", block_size=[256], grid=[256])(tokens[:, :-1]).logits
    torch.testing.assert_close(blocks, one_block, rtol=1e-4, atol=1e-4)
