# SPDX-License-Identifier: Apache-2.0
"""Pushing MHLA pipelines to a Hub and loading them from it, against a real server on the loopback interface."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mhla_hf import MHLAWanTransformer3DModel
from tests import ROOT, tiny
from tests.hub_server import HubServer
from tests.models.model_case import perturb_mhla


GENERATE = """
        def generate(pipeline):
            return pipeline(
                prompt="a three moves left", height=16, width=32, num_frames=5, num_inference_steps=2,
                generator=torch.Generator().manual_seed(0), output_type="np", max_sequence_length=16,
            ).frames[0]
"""


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


def run(program: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def pushed(hub, tmp_path_factory):
    """A trained MHLA pipeline and a softmax one, pushed by a process of their own; the MHLA one's video."""
    folder = tmp_path_factory.mktemp("pushed")
    pipeline = tiny.wan_pipeline(MHLAWanTransformer3DModel, mhla={"blocks": [2, 1, 2]})
    perturb_mhla(pipeline.transformer)
    pipeline.save_pretrained(folder / "local")
    program = f"""
        import diffusers, mhla_hf
        import numpy, torch
        from diffusers import DiffusionPipeline, WanTransformer3DModel
        {GENERATE}
        pipeline = DiffusionPipeline.from_pretrained({str(folder / "local")!r})
        assert type(pipeline.transformer) is mhla_hf.MHLAWanTransformer3DModel
        numpy.save({str(folder / "video.npy")!r}, generate(pipeline))
        pipeline.save_pretrained({str(folder / "saved")!r}, push_to_hub=True, repo_id="user/mhla")
        pipeline.transformer.push_to_hub("user/transformer-only")
    """
    run(program, hub.environment(folder / "home"))
    return folder


def test_pushed_repository_is_complete(hub, pushed):
    assert hub.unknown == []
    files = hub.repositories["user/mhla"].files
    index = json.loads(files["model_index.json"])
    assert index["transformer"] == ["diffusers", "MHLAWanTransformer3DModel"]
    assert json.loads(files["transformer/config.json"])["mhla"]["blocks"] == [2, 1, 2]
    assert {"README.md", "vae/config.json", "transformer/diffusion_pytorch_model.safetensors"} <= set(files)
    local = pushed / "local/transformer/diffusion_pytorch_model.safetensors"
    assert len(files["transformer/diffusion_pytorch_model.safetensors"]) == local.stat().st_size
    assert "config.json" in hub.repositories["user/transformer-only"].files


def test_loads_from_the_hub_in_a_fresh_process(hub, pushed):
    program = f"""
        import mhla_hf, diffusers
        import numpy, torch
        from diffusers import AutoModel, DiffusionPipeline
        {GENERATE}
        expected = numpy.load({str(pushed / "video.npy")!r})
        pipelines = [
            DiffusionPipeline.from_pretrained("user/mhla"),
            mhla_hf.load_pipeline("user/mhla"),
            mhla_hf.load_pipeline("user/mhla", None, revision="main", token="loopback"),
        ]
        for pipeline in pipelines:
            assert type(pipeline.transformer) is mhla_hf.MHLAWanTransformer3DModel
            numpy.testing.assert_allclose(generate(pipeline), expected, atol=1e-5)
        model = mhla_hf.MHLAWanTransformer3DModel.from_pretrained("user/transformer-only")
        assert type(AutoModel.from_pretrained("user/transformer-only")) is type(model)
        for name, value in model.state_dict().items():
            assert torch.equal(value, pipelines[0].transformer.state_dict()[name]), name
        override = mhla_hf.MHLAWanTransformer3DModel.from_pretrained(
            "user/mhla", subfolder="transformer", mhla={{"normalizer": "none"}}
        )
        assert override.mhla_config.normalizer == "none"
        try:
            mhla_hf.load_pipeline("user/mhla", "softmax")
        except ValueError as error:
            assert "user/mhla" in str(error)
        else:
            raise AssertionError("softmax was not refused")
        try:
            mhla_hf.load_pipeline("user/nothing")
        except OSError as error:
            assert "user/nothing" in str(error)
        else:
            raise AssertionError("a repository that does not exist was not refused")
    """
    run(program, hub.environment(pushed / "other-home"))
    assert hub.unknown == []
    assert np.load(pushed / "video.npy").shape == (5, 16, 32, 3)
