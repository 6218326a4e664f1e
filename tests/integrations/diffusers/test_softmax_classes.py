# SPDX-License-Identifier: Apache-2.0
"""MHLA checkpoints and the softmax classes of diffusers: MHLA or an error, never softmax in silence."""

import importlib
import json
import pickle

import pytest
import torch
from diffusers import AutoModel, DiffusionPipeline, Transformer2DModel, WanTransformer3DModel
from safetensors.torch import load_file, save_file

import mhla_hf
from mhla_hf.integrations import diffusers as diffusers_integration
from tests import tiny, tiny_images
from tests.edits import edit_json
from tests.families.cases import CASES, DiTCase, PixArtCase, WanCase
from tests.families.model_case import assert_same_parameters, perturb_mhla, recorded_warnings
from tests.processes import run_program


WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
class TestWithThePackage:
    def test_from_pretrained_and_from_config_give_mhla(self, case, tmp_path):
        model = case.make_mhla()
        # Also before it was saved, when its configuration names no class.
        assert type(case.upstream.from_config(model.config)) is case.mhla_class
        model.save_pretrained(tmp_path / "transformer", max_shard_size="30KB")
        assert "dtype" not in model.config
        for load in (case.upstream.from_pretrained, case.mhla_class.from_pretrained, AutoModel.from_pretrained):
            with recorded_warnings() as warnings:
                loaded = load(str(tmp_path), subfolder="transformer", torch_dtype=torch.float32)
            assert type(loaded) is case.mhla_class and warnings == [] and "dtype" not in loaded.config
            assert_same_parameters(loaded, model)
        config = case.upstream.load_config(tmp_path, subfolder="transformer")
        for load in (case.upstream.from_config, case.mhla_class.from_config, AutoModel.from_config):
            built = load(config)
            assert type(built) is case.mhla_class and built.config.mhla == model.config.mhla

    def test_earlier_directories_load(self, case, tmp_path):
        model = case.make_mhla()
        model.save_pretrained(tmp_path)
        edit_json(tmp_path / "config.json", dtype=...)
        assert_same_parameters(case.upstream.from_pretrained(tmp_path), model)
        assert_same_parameters(case.mhla_class.from_pretrained(tmp_path), model)

    def test_other_classes_refuse(self, case, tmp_path):
        case.make_mhla().save_pretrained(tmp_path)

        class Derived(case.upstream):
            pass

        for cls in (Derived, next(other.upstream for other in CASES if other.upstream is not case.upstream)):
            with pytest.raises(ValueError, match=f"would load without MHLA. Use {case.mhla_class.__name__}"):
                cls.from_pretrained(tmp_path)

    def test_softmax_models_load_as_before(self, case, tmp_path):
        model = case.make(case.upstream)
        model.save_pretrained(tmp_path)
        assert "dtype" not in json.loads((tmp_path / "config.json").read_text())
        loaded = case.upstream.from_pretrained(tmp_path)
        assert type(loaded) is case.upstream
        assert_same_parameters(pickle.loads(pickle.dumps(loaded)), model)
        with pytest.raises(OSError):
            case.upstream.from_pretrained(tmp_path / "nothing")


@pytest.fixture
def unguarded(monkeypatch):
    """diffusers' own ways of loading."""
    for module, owner, name, _ in diffusers_integration._METHODS:
        found = importlib.import_module(f"diffusers.{module}")
        wrapped = getattr(found, owner) if owner else found
        current = vars(wrapped)[name]
        own = getattr(current, "__func__", current).__wrapped__
        monkeypatch.setattr(wrapped, name, classmethod(own) if isinstance(current, classmethod) else own)


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_softmax_classes_fail_by_themselves(case, unguarded, tmp_path):
    case.make_mhla().save_pretrained(tmp_path)
    config = case.upstream.load_config(tmp_path)
    with recorded_warnings() as warnings, pytest.raises(TypeError, match="unexpected keyword argument 'dtype'"):
        case.upstream.from_pretrained(tmp_path)
    assert any("MHLA weights: import mhla_hf before you load them" in message for message in warnings)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtype'"):
        case.upstream.from_config(config)


@pytest.mark.slow
def test_without_the_package_every_way_of_loading_fails(tmp_path):
    for case in CASES:
        case.make_mhla().save_pretrained(tmp_path / case.upstream.__name__)
    mhla_hf.convert(tiny.wan_pipeline(), WanCase.options).save_pretrained(tmp_path / "pipeline")
    program = """
import json, sys
from pathlib import Path
import diffusers
from diffusers.modular_pipelines import ComponentSpec

root, found = Path(sys.argv[1]), {}
def attempt(name, load, *arguments, **options):
    try:
        found[name] = type(load(*arguments, **options)).__name__
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"

for folder in sorted(root.iterdir()):
    cls = getattr(diffusers, folder.name, None)
    if cls is None:
        continue
    attempt(f"{folder.name} from_pretrained", cls.from_pretrained, folder)
    attempt(f"{folder.name} slow", cls.from_pretrained, folder, low_cpu_mem_usage=False)
    attempt(f"{folder.name} from_config", lambda: cls.from_config(cls.load_config(folder)))
    attempt(f"{folder.name} AutoModel", diffusers.AutoModel.from_pretrained, folder)
    spec = ComponentSpec(name="transformer", type_hint=cls, pretrained_model_name_or_path=str(folder))
    attempt(f"{folder.name} modular", spec.load)
attempt("pipeline", diffusers.DiffusionPipeline.from_pretrained, root / "pipeline")
assert "mhla_hf" not in sys.modules
print(json.dumps(found))
"""
    result = run_program(program, tmp_path)
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == 5 * len(CASES) + 1
    assert all("Error: " in outcome for outcome in found.values()), found
    assert "import mhla_hf before calling `from_pretrained`" in found["pipeline"]
    assert all("trust_remote_code=True" in outcome for name, outcome in found.items() if name.endswith(" AutoModel"))
    assert "MHLA weights: import mhla_hf before you load them" in result.stderr


# Pipelines whose model is converted after they were made


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_saved_index_names_the_class_after_conversion_of_the_model_alone(compiled, tmp_path):
    pipeline = tiny.wan_pipeline()
    mhla_hf.convert(pipeline.transformer, WanCase.options)
    perturb_mhla(pipeline.transformer)
    transformer = pipeline.transformer
    if compiled:
        pipeline.transformer = torch.compile(transformer)
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["mhla_hf", "MHLAWanTransformer3DModel"]
    assert_same_parameters(DiffusionPipeline.from_pretrained(tmp_path).transformer, transformer)


def test_an_index_that_names_the_softmax_class_gives_mhla(tmp_path):
    pipeline = mhla_hf.convert(tiny_images.pixart_pipeline(), PixArtCase.options)
    folder = tmp_path / "mixed"
    pipeline.save_pretrained(folder)
    edit_json(folder / "model_index.json", transformer=["diffusers", "PixArtTransformer2DModel"])
    for load in (DiffusionPipeline.from_pretrained, mhla_hf.load_pipeline):
        assert_same_parameters(load(folder).transformer, pipeline.transformer)
    with pytest.raises(ValueError, match="is an MHLA checkpoint"):
        mhla_hf.load_pipeline(folder, attn_implementation="softmax")
    with pytest.raises(ValueError, match="is a MHLAPixArtTransformer2DModel already"):
        mhla_hf.convert_pretrained(folder, tmp_path / "again", progress=False)


def test_modular_pipelines(tmp_path):
    from diffusers.modular_pipelines import ComponentSpec, ModularPipeline

    tiny.wan_pipeline().save_pretrained(tmp_path / "softmax")
    trained = perturb_mhla(mhla_hf.convert(tiny.wan_pipeline(), WanCase.options).transformer)
    trained.save_pretrained(tmp_path / "mhla/transformer")
    spec = ComponentSpec(
        name="transformer",
        type_hint=WanTransformer3DModel,
        pretrained_model_name_or_path=str(tmp_path / "mhla"),
        subfolder="transformer",
    )
    loaded = spec.load()
    assert_same_parameters(loaded, trained)

    pipeline = ModularPipeline.from_pretrained(str(tmp_path / "softmax"))
    pipeline.load_components(torch_dtype=torch.float32)
    mhla_hf.convert(pipeline.transformer, WanCase.options)
    perturb_mhla(pipeline.transformer)
    pipeline.save_pretrained(str(tmp_path / "saved"), overwrite_modular_index=True)
    library, name, entry = json.loads((tmp_path / "saved/modular_model_index.json").read_text())["transformer"]
    assert [library, name] == entry["type_hint"] == ["mhla_hf", "MHLAWanTransformer3DModel"]
    again = ModularPipeline.from_pretrained(str(tmp_path / "saved"))
    again.load_components(names="transformer")
    assert_same_parameters(again.transformer, pipeline.transformer)


# Single files


def test_single_files_of_mhla_weights_are_refused(tmp_path):
    model = WanCase().make_mhla()
    model.save_pretrained(tmp_path / "mhla")
    WanCase().make(WanTransformer3DModel).save_pretrained(tmp_path / "softmax")
    load = WanTransformer3DModel.from_single_file
    softmax = load(str(tmp_path / "softmax" / WEIGHTS), config=str(tmp_path / "softmax"))
    assert type(softmax) is WanTransformer3DModel
    with pytest.raises(ValueError, match="file has MHLA weights"):
        load(str(tmp_path / "mhla" / WEIGHTS), config=str(tmp_path / "softmax"))
    with pytest.raises(ValueError, match="file has no MHLA weights"):
        load(str(tmp_path / "softmax" / WEIGHTS), config=str(tmp_path / "mhla"))
    weights = load_file(tmp_path / "softmax" / WEIGHTS)
    weights["blocks.0.self_attn.block_attn.conv.weight"] = torch.ones(6, 6, 1, 1)
    save_file(weights, tmp_path / "authors.safetensors")
    with pytest.raises(ValueError, match="import-official"):
        load(str(tmp_path / "authors.safetensors"), config=str(tmp_path / "softmax"))


@pytest.mark.parametrize("case", [DiTCase(), PixArtCase()], ids=lambda case: type(case).__name__)
def test_the_class_that_chooses_between_dit_and_pixart(case, tmp_path):
    model = case.make_mhla()
    assert type(Transformer2DModel.from_config(model.config)) is case.mhla_class
    model.save_pretrained(tmp_path)
    loaded = Transformer2DModel.from_pretrained(str(tmp_path))
    assert type(loaded) is case.mhla_class
    assert_same_parameters(loaded, model)
    assert type(Transformer2DModel.from_config(case.make(case.upstream).config)) is case.upstream
