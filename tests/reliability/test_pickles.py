# SPDX-License-Identifier: Apache-2.0
"""Pickled models are read by processes that have not imported the package, and copies stay what they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import mhla_hf
from tests import tiny
from tests.families.cases import SanaCase
from tests.integrations.transformers.tiny_models import inputs, softmax_model
from tests.processes import run_program


BLOCKS = {"blocks": [2, 1, 2]}
CASES = {
    "wan": lambda: (tiny.wan_transformer(mhla_hf.MHLAWanTransformer3DModel, mhla=BLOCKS), tiny.wan_inputs()),
    "wan converted": lambda: (mhla_hf.convert(tiny.wan_transformer(), BLOCKS), tiny.wan_inputs()),
    "sana": lambda: (SanaCase().make(mhla_hf.MHLASanaTransformer2DModel), SanaCase().inputs()),
    "llama": lambda: (mhla_hf.convert(softmax_model("llama"), {"block_size": 4}), inputs("llama")),
    "bert": lambda: (mhla_hf.convert(softmax_model("bert"), {"block_size": 4}), inputs("bert")),
}


def output(model, given):
    with torch.no_grad():
        return model(**given)[0]


@pytest.mark.slow
def test_pickles_import_the_package(tmp_path):
    for name in ("wan", "sana", "llama"):
        model, given = CASES[name]()
        # As for processes that are spawned: a class alone, too.
        (tmp_path / name).write_bytes(pickle.dumps((type(model), model, given, output(model, given))))
    program = """
        import os, pathlib, pickle, sys
        import torch
        from diffusers import SanaTransformer2DModel, WanTransformer3DModel
        from transformers import LlamaForCausalLM

        torch.set_num_threads(1)
        for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
            assert "mhla_hf" not in sys.modules
            # What one pickle imports must not be there for the next one.
            if os.fork():
                assert os.wait()[1] == 0, path.name
                continue
            model_class, model, given, expected = pickle.loads(path.read_bytes())
            with torch.no_grad():
                assert type(model) is model_class
                torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=1e-6)
            os._exit(0)
    """
    run_program(program, tmp_path)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", CASES)
def test_copies(name, copied):
    model, given = CASES[name]()
    expected = output(model, given)
    other = copied(model)
    assert type(other) is type(model) and torch.equal(output(other, given), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(output(model, given), expected)
