# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness through its `hf` model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import mhla_hf  # noqa: F401
from mhla_hf.integrations.transformers.attaching import convert_transformers_model

from .mhla_models import mhla_modules
from .test_generation import recompute
from .tiny_files import save_softmax, tokenizer


pytest.importorskip("lm_eval")

OPTIONS = {"block_size": 4}
REQUESTS = [("hello", " world"), ("a longer text, so that", " others are padded"), ("x", "y")]


@pytest.fixture(scope="module")
def harness():
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    return lambda pretrained, **options: huggingface.HFLM(
        pretrained=pretrained, device="cpu", batch_size=2, max_length=64, **options
    )


@pytest.fixture
def directory(tmp_path):
    return save_softmax("llama", tmp_path / "softmax")


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, argument, index) for index, argument in enumerate(arguments)]


def likelihoods(model, words):
    """Log-likelihood of each continuation and whether it is the most likely one, one request at a time."""
    results = []
    for context, continuation in REQUESTS:
        start = words(context, return_tensors="pt").input_ids
        whole = words(context + continuation, return_tensors="pt").input_ids
        with torch.no_grad():
            scores = model.eval()(whole).logits.log_softmax(-1)[0, start.shape[1] - 1 : -1]
        target = whole[0, start.shape[1] :]
        greedy = torch.equal(scores.argmax(-1), target)
        results.append((scores.gather(-1, target[:, None]).sum().item(), greedy))
    return results


@pytest.mark.parametrize("given", ["directory", "MHLA directory", "model"])
def test_loglikelihood(tmp_path, directory, harness, given):
    reference = convert_transformers_model(AutoModelForCausalLM.from_pretrained(directory), OPTIONS)
    if given == "directory":
        language_model = harness(str(directory), attn_implementation="mhla", mhla=OPTIONS, dtype="float32")
    elif given == "MHLA directory":
        reference.save_pretrained(tmp_path / "mhla")
        tokenizer("llama").save_pretrained(tmp_path / "mhla")
        language_model = harness(str(tmp_path / "mhla"), dtype="float32")
    else:
        language_model = harness(reference, tokenizer=tokenizer("llama"))
    assert len(mhla_modules(language_model.model)) == 3
    results = language_model.loglikelihood(requests("loglikelihood", REQUESTS), disable_tqdm=True)
    for result, expected in zip(results, likelihoods(reference, tokenizer("llama")), strict=True):
        assert result[0] == pytest.approx(expected[0], rel=1e-4)
        assert result[1] == expected[1]


def test_generate_until(directory, harness):
    language_model = harness(str(directory), attn_implementation="mhla", mhla=OPTIONS, dtype="float32")
    arguments = [(text, {"until": ["\0"], "max_gen_toks": 8, "do_sample": False}) for text, _ in REQUESTS]
    results = language_model.generate_until(requests("generate_until", arguments), disable_tqdm=True)
    words = tokenizer("llama")
    for (text, _), result in zip(REQUESTS, results, strict=True):
        tokens = words(text, return_tensors="pt").input_ids
        length = tokens.shape[1]
        tokens, _ = recompute(language_model.model, tokens, torch.ones_like(tokens), steps=8)
        assert result == words.decode(tokens[0, length:], skip_special_tokens=True)
