# SPDX-License-Identifier: Apache-2.0
"""The nodes of `comfyui/`: their contract, workflows on tiny pipelines, and errors."""

from __future__ import annotations

import copy
import inspect
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

import mhla_hf
from mhla_hf import MHLASanaTransformer2DModel, MHLAWanTransformer3DModel
from tests import ROOT, tiny, tiny_images
from tests.comfyui.standin import ComfyUI, Interrupted, check_contract
from tests.families.model_case import perturb_mhla


if sys.version_info >= (3, 11):
    import tomllib


FOLDER = ROOT / "comfyui"
WORKFLOW = json.loads((FOLDER / "api_workflows" / "mhla_video.json").read_text(encoding="utf-8"))
WAN = {"prompt": "a zero", "steps": 2, "width": 32, "height": 16, "frames": 9, "seed": 7}
SANA = {**WAN, "width": 512, "height": 512, "frames": 0}


PIPELINES = {
    "wan": lambda: tiny.wan_pipeline(MHLAWanTransformer3DModel, mhla={"blocks": [1, 2, 2]}),
    "wan-i2v": lambda: tiny.wan_pipeline(MHLAWanTransformer3DModel, image_to_video=True, mhla={"blocks": [1, 2, 2]}),
    "sana": lambda: tiny_images.sana_pipeline(MHLASanaTransformer2DModel, mhla={"blocks": [2, 2]}),
    "sprint": lambda: tiny_images.sana_pipeline(MHLASanaTransformer2DModel, sprint=True, mhla={"blocks": [2, 2]}),
    "sana-video": tiny_images.sana_video_pipeline,
    "pixart": tiny_images.pixart_pipeline,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a tiny pipeline once, whose MHLA parameters are not the initial ones, and returns its directory."""
    root = tmp_path_factory.mktemp("pipelines")

    def save(name):
        if not (root / name).is_dir():
            pipeline = PIPELINES[name]()
            if name not in ("pixart", "sana-video"):
                with torch.no_grad():
                    perturb_mhla(pipeline.transformer)
            pipeline.save_pretrained(root / name)
        return root / name

    return save


@pytest.fixture
def comfy(tmp_path, monkeypatch):
    """ComfyUI with the folder copied to where it belongs."""
    installation = ComfyUI(tmp_path / "ComfyUI", monkeypatch)
    folder = installation.root / "custom_nodes" / "mhla"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    installation.load_custom_node(folder)
    return installation


def workflow(path, *, load=None, save=None, **sample):
    """The example workflow with other inputs."""
    changed = copy.deepcopy(WORKFLOW)
    changed["1"]["inputs"].update({"path": str(path), **(load or {})})
    changed["2"]["inputs"].update(sample)
    changed["3"]["inputs"].update(save or {})
    return changed


def expected(directory, values):
    """What the pipeline itself generates."""
    pipeline = DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    sizes = {name: values[name] for name in ("width", "height")}
    length = {"num_frames": values["frames"]} if values["frames"] else {}
    output = pipeline(
        values["prompt"],
        negative_prompt="",
        num_inference_steps=values["steps"],
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(values["seed"]),
        output_type="np",
        **sizes,
        **length,
    )
    return output.frames[0] if values["frames"] else output.images


def test_the_nodes_keep_the_contract(comfy):
    assert set(comfy.node_classes) == set(comfy.display_names) == {node["class_type"] for node in WORKFLOW.values()}
    for node_class in comfy.node_classes.values():
        check_contract(node_class)


@pytest.mark.parametrize(("name", "values"), [("wan", WAN), pytest.param("sana", SANA, marks=pytest.mark.slow)])
def test_the_workflow_generates_what_the_pipeline_does(comfy, saved, name, values):
    outputs = comfy.run(workflow(saved(name), **values))
    frames, reference = outputs["2"][0], expected(saved(name), values)
    assert frames.shape == (values["frames"] or 1, values["height"], values["width"], 3)
    assert frames.dtype == torch.float32 and 0 <= frames.min() and frames.max() <= 1
    np.testing.assert_array_equal(frames.numpy(), reference)
    assert frames.std() > 0
    assert comfy.progress == [(1, 2), (2, 2)]
    assert type(outputs["1"][0].transformer).__name__.startswith("MHLA")
    assert type(outputs["1"][0]).__name__ == {"wan": "WanPipeline", "sana": "SanaPipeline"}[name]


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "model"])
def test_an_interrupted_run_leaves_the_pipeline_usable(comfy, saved, offload):
    """Offloading, here from the CPU to itself, keeps what it has to undo after each run."""
    chosen = workflow(saved("wan"), load={"offload": offload}, **WAN)
    comfy.interrupt_after = 1
    with pytest.raises(Interrupted):
        comfy.run(chosen)
    assert comfy.progress == [(1, 2)]
    assert list(comfy.output.iterdir()) == []
    comfy.interrupt_after = None
    np.testing.assert_array_equal(comfy.run(chosen)["2"][0].numpy(), expected(saved("wan"), WAN))


@pytest.mark.slow
def test_saved_files(comfy, saved):
    made = {}
    for kind in ("webp", "png", "mp4"):
        outputs = comfy.run(workflow(saved("wan"), save={"format": kind, "filename_prefix": "runs/a"}, **WAN))
        made[kind] = outputs["3"]["ui"]
        assert ("animated" in made[kind]) == (kind != "png")
        assert all(file["subfolder"] == "runs" and file["type"] == "output" for file in made[kind]["images"])
    names = {kind: [file["filename"] for file in ui["images"]] for kind, ui in made.items()}
    assert names["webp"] == ["a_00001_.webp"] and names["mp4"] == ["a_00011_.mp4"]
    assert names["png"] == [f"a_{number:05}_.png" for number in range(2, 11)]
    folder = comfy.output / "runs"
    assert sorted(file.name for file in folder.iterdir()) == sorted(name for kind in names.values() for name in kind)

    pixels = (outputs["2"][0].numpy() * 255).round().astype(np.uint8)
    for frame, name in zip(pixels, names["png"]):
        with Image.open(folder / name) as image:
            np.testing.assert_array_equal(np.asarray(image), frame)
            assert json.loads(image.text["prompt"])["2"]["inputs"]["prompt"] == "a zero"
            assert json.loads(image.text["workflow"]) == {"nodes": []}
    with Image.open(folder / names["webp"][0]) as image:
        assert (image.n_frames, image.size) == (9, (32, 16))
        assert json.loads(image.getexif()[0x0110].removeprefix("prompt:")).keys() == WORKFLOW.keys()
    import imageio.v3

    assert imageio.v3.imread(folder / names["mp4"][0], plugin="FFMPEG").shape == (9, 16, 32, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sample", "words"),
    [
        ("", WAN, r"type a directory or a Hub id"),
        ("/no/such/directory", WAN, r"neither a directory nor a Hub id"),
        ("pixart", WAN, r"is a PixArtAlphaPipeline; these nodes run WanPipeline"),
        ("wan", {**WAN, "frames": 10}, r"frames=10 is not a multiple of 4 and one more, such as 9"),
        ("wan", {**WAN, "width": 40}, r"divisible by 16"),
        ("wan", {**WAN, "height": 8192}, r"height=8192 is more than this model has positions for, 1024"),
        ("wan-i2v", WAN, r"WanImageToVideoPipeline needs an image"),
        ("sana", {**SANA, "frames": 9}, r"SanaPipeline makes single images: set frames to 0"),
        ("sprint", {**SANA, "negative_prompt": "x"}, r"SanaSprintPipeline takes no negative_prompt"),
    ],
)
def test_mistakes_are_one_line(comfy, saved, name, sample, words):
    path = saved(name) if name in PIPELINES else name
    with pytest.raises(ValueError, match=words) as error:
        comfy.run(workflow(path, **sample))
    assert "\n" not in str(error.value)
    assert comfy.progress == []


class TestFirstFrame:
    def read(self, comfy, image):
        functions = [inspect.unwrap(getattr(node, node.FUNCTION)).__globals__ for node in comfy.node_classes.values()]
        make = next(each["optional_inputs"] for each in functions if "optional_inputs" in each)
        return np.asarray(make(None, {"image": None}, "", 0, image)["image"])

    def test_channels(self, comfy):
        shades = torch.tensor([0.0, 0.2, 1.0]).view(1, 1, 3, 1)
        colours = torch.cat([shades, shades * 0.5, shades * 0], dim=-1)
        expected = [[0, 0, 0], [51, 26, 0], [255, 128, 0]]
        assert self.read(comfy, colours)[0].tolist() == expected
        alpha = torch.tensor([1.0, 0.0, 0.5]).view(1, 1, 3, 1)
        mixed = [[0, 0, 0], [255, 255, 255], [255, 191, 128]]
        assert self.read(comfy, torch.cat([colours, alpha], dim=-1))[0].tolist() == mixed
        assert self.read(comfy, shades)[0].tolist() == [[0] * 3, [51] * 3, [255] * 3]

    @pytest.mark.parametrize("shape", [(3, 8, 8, 3), (0, 8, 8, 3), (8, 8, 3), (1, 8, 8, 2), (1, 3, 8, 8)])
    def test_other_shapes_are_refused(self, comfy, shape):
        with pytest.raises(ValueError, match=r"connect one picture \[1, height, width, channels\]") as error:
            self.read(comfy, torch.zeros(shape))
        assert str(shape) in str(error.value) and "\n" not in str(error.value)


def test_the_template_is_the_workflow_of_the_api(comfy):
    """Widgets are in the order of the inputs, and a seed is followed by what becomes of it after a run."""
    template = json.loads((FOLDER / "example_workflows" / "mhla_video.json").read_text(encoding="utf-8"))
    links = {link[0]: [str(link[1]), link[2]] for link in template["links"]}
    converted = {}
    for node in template["nodes"]:
        node_class = comfy.node_classes[node["type"]]
        declared = node_class.INPUT_TYPES()
        linked = {entry["name"]: links[entry["link"]] for entry in node["inputs"] if entry["link"] is not None}
        values = iter(node["widgets_values"])
        inputs = {}
        for name, (_, *options) in declared["required"].items():
            if name in linked:
                inputs[name] = linked[name]
                continue
            inputs[name] = next(values)
            if options and options[0].get("control_after_generate"):
                assert next(values) == "fixed"
        assert list(values) == []
        assert [entry["type"] for entry in node["outputs"]] == list(node_class.RETURN_TYPES)
        converted[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    expected_nodes = {key: {name: node[name] for name in ("class_type", "inputs")} for key, node in WORKFLOW.items()}
    assert converted == expected_nodes
    assert comfy.validate(WORKFLOW) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_the_registry_s_file_agrees_with_the_package():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == mhla_hf.__version__
    assert project["project"]["dependencies"] == (FOLDER / "requirements.txt").read_text(encoding="utf-8").split()
    assert {"PublisherId", "DisplayName"} <= set(project["tool"]["comfy"])
