# SPDX-License-Identifier: Apache-2.0
"""Importing the package costs little beside transformers and changes nothing for models that do not use MHLA."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.processes import run_program


def run(program: str) -> dict:
    """What a program prints last."""
    return json.loads(run_program(program).stdout.splitlines()[-1])


REPORT = """
        def report():
            import torch, transformers
            from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

            sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            ids = torch.arange(12).reshape(2, 6)
            found = {}
            for make, config, given in (
                (LlamaForCausalLM, LlamaConfig(**sizes, vocab_size=32), dict(input_ids=ids)),
                (BertModel, BertConfig(**sizes, vocab_size=32), dict(input_ids=ids)),
                (ViTModel, ViTConfig(**sizes, image_size=8, patch_size=4), dict(pixel_values=torch.ones(1, 3, 8, 8))),
            ):
                torch.manual_seed(0)
                model = make(config).eval()
                output = model(**given)[0]
                found[make.__name__] = dict(
                    keys=sorted(model.state_dict()), output=output.double().sum().item(), first=output.flatten()[:5].tolist(),
                    config=sorted(model.config.to_dict()), implementation=model.config._attn_implementation,
                    hooks=sum(len(module._forward_pre_hooks) for module in model.modules()),
                )
                if hasattr(model, "generate"):
                    found["generated"] = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist()
            return found
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        pytest.param("import transformers\nimport mhla_hf", id="transformers_first"),
        pytest.param("import mhla_hf\nimport transformers", id="package_first"),
    ],
)
def test_other_models_are_as_they_were(order):
    tail = "\nimport json\nprint(json.dumps(report()))"
    program = textwrap.dedent(REPORT)
    assert run(f"{order}\n{program}{tail}") == run(f"{program}{tail}")
