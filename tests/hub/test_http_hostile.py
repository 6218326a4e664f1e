# SPDX-License-Identifier: Apache-2.0
"""Repositories on the Hub that were made to harm, and what `mhla-hf doctor` says of repositories."""

from __future__ import annotations

import json

import pytest


MAKE = """
    import json, struct
    from pathlib import Path
    import torch
    from huggingface_hub import HfApi
    from safetensors.torch import load_file
    from tests import hub_models

    folder = Path("{folder}")
    hub_models.make("language").save_pretrained(folder)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    {change}
    api = HfApi()
    api.create_repo("{repository}")
    api.upload_folder(repo_id="{repository}", folder_path=folder)
"""
INDEX = """
    index = {{"metadata": {{}}, "weight_map": dict.fromkeys(tensors, "{name}")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights.unlink()
"""
LOAD = """
    import mhla_hf
    from transformers import AutoModelForCausalLM
    try:
        AutoModelForCausalLM.from_pretrained("{repository}")
    except (ValueError, OSError) as error:
        print(type(error).__name__, str(error))
    else:
        print("loaded")
"""
ATTACKS = {
    "index-above": (INDEX.format(name="../outside.safetensors"), "../outside.safetensors"),
    "pickle": ("torch.save(tensors, folder / 'pytorch_model.bin'); weights.unlink()", "only as pytorch_model.bin"),
    "header": ("weights.write_bytes(struct.pack('<Q', 10**10) + b'x')", "is truncated or not a safetensors file"),
}


def make(client, folder, repository, change="pass"):
    client.check(MAKE.format(folder=folder, repository=repository, change=change.strip()))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_repository(attack, hub, client, tmp_path):
    change, message = ATTACKS[attack]
    repository = f"user/{attack}"
    make(client, tmp_path / "made", repository, change)
    lines = client.check(LOAD.format(repository=repository)).strip().splitlines()
    assert len(lines) == 1 and message in lines[0] and len(lines[0]) < 700, lines
    result = client.command("doctor", repository)
    errors = [line for line in result.output.splitlines() if line.startswith("error")]
    assert result.code == 1 and len(errors) == 1, result


def test_doctor_of_a_repository(hub, client, tmp_path):
    make(client, tmp_path / "made", "user/good")
    result = client.command("doctor", "user/good", "--json", tmp_path / "report.json")
    assert result.code == 0 and "2 MHLA, 0 softmax layers" in result.output, result
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["source"]["location"] == "user/good" and report["errors"] == 0
