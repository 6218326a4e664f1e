# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's nodes with a repository of the Hub."""

from __future__ import annotations

import pytest

from tests import ROOT


@pytest.mark.slow
def test_a_repository_is_checked_loaded_and_run(client, hub, tmp_path):
    printed = client.check(f"""
        import json, pathlib, pytest, torch
        from tests import hub_models
        from tests.comfyui.standin import ComfyUI

        pipeline = hub_models.make("wan")
        pipeline.push_to_hub("user/nodes")
        with pytest.MonkeyPatch.context() as monkeypatch:
            comfy = ComfyUI(pathlib.Path("{tmp_path}") / "ComfyUI", monkeypatch)
            comfy.load_custom_node(pathlib.Path("{ROOT}") / "comfyui")
            workflow = json.loads(pathlib.Path("{ROOT}/comfyui/api_workflows/mhla_video.json").read_text())
            sizes = {{"width": 32, "height": 16, "frames": 5, "steps": 1}}
            workflow["1"]["inputs"]["path"] = "user/nodes"
            workflow["2"]["inputs"].update(sizes)
            outputs = comfy.run(workflow)
            assert type(outputs["1"][0].transformer) is type(pipeline.transformer)
            for name, value in pipeline.transformer.state_dict().items():
                assert torch.equal(outputs["1"][0].transformer.state_dict()[name], value), name
            assert outputs["2"][0].shape == (5, 16, 32, 3)
            workflow["1"]["inputs"]["path"] = "user/no-such-repository"
            try:
                comfy.run(workflow)
            except ValueError as error:
                print(error)
    """)
    assert "user/no-such-repository" in printed and len(printed.splitlines()) == 1
    assert hub.unknown == []
