# SPDX-License-Identifier: Apache-2.0
"""Each touch point of another library's internals: what it gives, and one plain line where the shape is unknown."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from diffusers import DiffusionPipeline, ModelMixin, WanPipeline, WanTransformer3DModel
from diffusers.hooks import _helpers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mhla_hf.utils import compat
from mhla_hf.utils.compat import UnsupportedVersionError, unwrap, wrap
from mhla_hf.utils.compat import diffusers as of_diffusers
from mhla_hf.utils.compat import transformers as of_transformers
from tests import ROOT


NOTHING = SimpleNamespace(__name__="Nothing")


class Nothing:
    """A class without anything that is looked for."""


class Called:
    def __call__(self, steps=3):
        pass


def steps(**changes):
    names = ("build", "finish", "initialize", "place_missing", "report_names", "read", "plan", "choose", "save")
    return {name: lambda original, *args: original(*args) for name in names} | changes


def without(owner, name):
    """A change that takes a name from a module, given by its name, or from a class."""

    def change(monkeypatch):
        monkeypatch.delattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name)

    return change


def no_change(monkeypatch):
    pass


UNKNOWN = {
    "attention_of": (no_change, lambda: of_transformers.attention_of(NOTHING), "_attn_implementation"),
    "set_attention": (no_change, lambda: of_transformers.set_attention(NOTHING, "mhla"), "_attn_implementation"),
    "can_choose_attention": (
        no_change, lambda: of_transformers.can_choose_attention(Nothing), "_can_set_attn_implementation",
    ),
    "supports_sdpa": (no_change, lambda: of_transformers.supports_sdpa(NOTHING), "_supports_sdpa"),
    "fp32_patterns": (no_change, lambda: of_transformers.fp32_patterns(NOTHING, True), "_keep_in_fp32_modules_strict"),
    "ignored_names": (
        no_change, lambda: of_transformers.ignored_names(NOTHING, "load_missing"), "_keys_to_ignore_on_load_missing",
    ),
    "task_classes": (
        without("transformers.modelcard", "TASK_MAPPING"), of_transformers.task_classes, "modelcard.TASK_MAPPING",
    ),
    "hook_models": (no_change, lambda: of_transformers.hook_models(Nothing, **steps()), "PreTrainedModel.post_init"),
    "parallel_tools": (
        lambda monkeypatch: monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None),
        of_transformers.parallel_tools, "distributed.tensor_parallel.TensorParallelLayer",
    ),
    "add_parallel_rules": (no_change, lambda: of_transformers.add_parallel_rules(NOTHING, {}), "_tp_plan"),
    "renaming_rules": (
        without("transformers.conversion_mapping", "get_model_conversion_mapping"),
        lambda: of_transformers.renaming_rules(NOTHING), "get_model_conversion_mapping",
    ),
    "loaded_name": (
        without("transformers.core_model_loading", "rename_source_key"),
        lambda: of_transformers.loaded_name("a", [], "", {}), "rename_source_key",
    ),
    "keep_used_rules": (no_change, lambda: of_transformers.keep_used_rules(NOTHING, [NOTHING]), "was_used"),
    "saved_tensors": (
        without("transformers.core_model_loading", "revert_weight_conversion"),
        lambda: of_transformers.saved_tensors(NOTHING, {}), "revert_weight_conversion",
    ),
    "without_tied": (
        without("transformers.modeling_utils", "remove_tied_weights_from_state_dict"),
        lambda: of_transformers.without_tied(NOTHING, {}), "remove_tied_weights_from_state_dict",
    ),
    "declared": (no_change, lambda: of_diffusers.declared(Nothing, "_no_split_modules"), "_no_split_modules"),
    "fp32_parts": (no_change, lambda: of_diffusers.fp32_parts(Nothing), "_keep_in_fp32_modules"),
    "context_parallel_plan": (no_change, lambda: of_diffusers.context_parallel_plan(Nothing), "Nothing._cp_plan"),
    "loading_call": (
        no_change, lambda: of_diffusers.loading_call(lambda model, path: None, 1, 2), "_load_pretrained_model",
    ),
    "loading_call-names": (
        no_change, lambda: of_diffusers.loading_call(lambda model: None, 1, 2), "_load_pretrained_model",
    ),
    "load_weights": (
        no_change,
        lambda: of_diffusers.load_weights(lambda: (1, 2), inspect.signature(lambda: None).bind()),
        "result of ModelMixin._load_pretrained_model",
    ),
    "hook_single_files": (
        no_change, lambda: of_diffusers.hook_single_files(ModuleType("single"), print), "_should_convert",
    ),
    "loads_single_files": (
        without("diffusers.loaders.single_file_model", "SINGLE_FILE_LOADABLE_CLASSES"),
        lambda: of_diffusers.loads_single_files("Wan"), "SINGLE_FILE_LOADABLE_CLASSES",
    ),
    "rename_wan_weights": (
        without("diffusers.loaders.single_file_utils", "convert_wan_transformer_to_diffusers"),
        lambda: of_diffusers.rename_wan_weights([]), "convert_wan_transformer_to_diffusers",
    ),
    "lora_metadata_key": (
        without("diffusers.loaders.lora_base", "LORA_ADAPTER_METADATA_KEY"), of_diffusers.lora_metadata_key,
        "LORA_ADAPTER_METADATA_KEY",
    ),
    "call_default": (
        no_change, lambda: of_diffusers.call_default(Called(), "prompt"), "Called.__call__(prompt=...)",
    ),
    "component_types": (no_change, lambda: of_diffusers.component_types(Nothing), "_get_signature_types"),
    "set_modular_component_type": (
        no_change, lambda: of_diffusers.set_modular_component_type(NOTHING, "vae", Nothing), "_component_specs",
    ),
    "skip_attention_in": (
        without(_helpers.AttentionProcessorRegistry, "_registry"),
        lambda: of_diffusers.skip_attention_in(Nothing), "AttentionProcessorRegistry._registry",
    ),
    "skip_layers_in": (
        without("diffusers.hooks._helpers", "TransformerBlockMetadata"),
        lambda: of_diffusers.skip_layers_in(Nothing), "hooks._helpers.TransformerBlockMetadata",
    ),
    "is_attention_skipped": (
        no_change, lambda: of_diffusers.is_attention_skipped(SimpleNamespace(_diffusers_hook=NOTHING)), "HookRegistry",
    ),
    "checkpointed": (
        no_change, lambda: of_diffusers.checkpointed(NOTHING, print), "_gradient_checkpointing_func",
    ),
    "check_parallel_setup": (
        no_change, lambda: of_diffusers.check_parallel_setup(Nothing), "_resolve_parallel_config",
    ),
    "set_parallel_config": (
        no_change, lambda: of_diffusers.set_parallel_config(NOTHING, None), "_parallel_config",
    ),
    "context_parallel_group": (
        no_change, lambda: of_diffusers.context_parallel_group(NOTHING), "ContextParallelConfig._flattened_mesh",
    ),
}  # fmt: skip

# Functions that have an answer for whatever they are given.
ANY_SHAPE = {
    "global_of", "has_parallel_plans", "hook_uploads", "initialize_once", "names_used", "parallel_config_of",
    "progress_bar_options", "reads_keywords", "register_library", "rotation_conditions", "source_of",
}  # fmt: skip


def functions():
    for module in (of_transformers, of_diffusers):
        for name, function in vars(module).items():
            function = inspect.unwrap(function) if callable(function) else None
            if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"):
                yield name, function


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_shape_is_named_in_one_line(name, monkeypatch):
    change, call, part = UNKNOWN[name]
    change(monkeypatch)
    with pytest.raises(UnsupportedVersionError) as caught:
        call()
    (line,) = str(caught.value).splitlines()
    library = "transformers" if hasattr(of_transformers, name) else "diffusers"
    assert line.startswith(f"{library} {sys.modules[library].__version__} does not have the known ")
    assert part in line and f"checked with {library} {compat.CHECKED[library]}" in line and "Install" in line


def test_every_touch_point_has_a_case():
    assert {name for name, _ in functions()} == {name.partition("-")[0] for name in UNKNOWN} | ANY_SHAPE


def test_the_modules_name_the_versions_and_the_error():
    for module, library in ((of_transformers, "transformers"), (of_diffusers, "diffusers")):
        told = ["UnsupportedVersionError", *compat.CHECKED[library].split(" and ")]
        assert all(part in (module.__doc__ or "") for part in told)


def trees(folder):
    for path in folder.rglob("*.py"):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_private_parts_are_touched_here_alone():
    here = ROOT / "mhla_hf/utils/compat"
    words = [node.value for _, tree in trees(here) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    private = {word for word in words if isinstance(word, str) and re.fullmatch("_[a-z]\\w+", word)}
    assert {"_keep_in_fp32_modules", "_attn_implementation", "_initialize_weights", "_cp_plan"} <= private
    found = []
    for path, tree in trees(ROOT / "mhla_hf"):
        for node in ast.walk(tree) if here not in path.parents else ():
            if isinstance(node, ast.Attribute) and node.attr in private:
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                # MHLA classes override methods of the same name.
                if not own and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"):
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                library, *names = [*node.module.split("."), *(alias.name for alias in node.names)]
                if library in compat.SUPPORTED and any(name.startswith("_") for name in names):
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert [line for line in found if "__version__" not in line] == []


class TestWrap:
    class Owner:
        def method(self, value):
            return value

        @classmethod
        def made(cls, value):
            return cls.__name__, value

    class Derived(Owner):
        pass

    def doubled(self, original, owner, value):
        return original(owner, 2 * value)

    def test_methods_and_class_methods_are_wrapped_once_and_restored(self):
        before = dict(vars(self.Owner))
        for _ in range(2):
            wrap("library", self.Owner, "method", self.doubled)
            wrap("library", self.Owner, "made", self.doubled)
        assert self.Owner().method(3) == 6 and self.Derived.made(3) == ("Derived", 6)
        assert self.Owner.method.__wrapped__ is before["method"]
        unwrap("library")
        assert dict(vars(self.Owner)) == before

    def test_inherited_ones_are_wrapped_in_the_class_alone(self):
        wrap("library", self.Derived, "method", self.doubled)
        assert self.Derived().method(3) == 6 and self.Owner().method(3) == 3
        unwrap("library")
        assert "method" not in vars(self.Derived) and self.Derived().method(3) == 3

    def test_other_libraries_stay_wrapped(self):
        wrap("library", self.Owner, "method", self.doubled)
        unwrap("another library")
        assert self.Owner().method(3) == 6
        unwrap("library")

    def test_missing_functions_are_an_error(self):
        with pytest.raises(UnsupportedVersionError, match=r"peft .* does not have the known Owner\.missing"):
            wrap("peft", self.Owner, "missing", self.doubled)


def test_no_model_is_changed_where_a_step_is_missing():
    class Model:
        post_init = _initialize_weights = _move_missing_keys_from_meta_to_device = lambda self: None

    before = dict(vars(Model))
    with pytest.raises(UnsupportedVersionError, match="_adjust_missing_and_unexpected_keys"):
        of_transformers.hook_models(Model, **steps())
    assert dict(vars(Model)) == before


def test_unknown_internals_of_transformers_leave_softmax_models(tmp_path):
    from .test_versions import LLAMA, REFUSED, run

    report, warnings = run(
        f"""
        import json
        from mhla_hf.integrations.transformers import patch
        from mhla_hf.utils.compat import unknown_shape

        def hook_models(*args, **kwargs):
            raise unknown_shape("transformers", "way to build models")

        patch.hook_models = hook_models
        {LLAMA.replace(chr(10) + "    ", chr(10) + "        ").strip()}
        {REFUSED.replace(chr(10) + "    ", chr(10) + "        ").strip()}

        LlamaForCausalLM(config).save_pretrained("{tmp_path}")
        message = refused(lambda: AutoModelForCausalLM.from_pretrained("{tmp_path}", attn_implementation="mhla"))
        print(json.dumps([message, LlamaForCausalLM.from_pretrained("{tmp_path}")(ids).logits.shape]))
        """
    )
    assert "does not have the known way to build models" in report[0] and report[1] == [2, 6, 32]
    assert len(warnings) == 1


class TestTransformers:
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
            tie_word_embeddings=True,
        )
    )  # fmt: skip

    def test_classes(self):
        assert of_transformers.attention_of(self.model.config) == "sdpa"
        assert of_transformers.can_choose_attention(LlamaForCausalLM) and of_transformers.supports_sdpa(self.model)
        assert of_transformers.fp32_patterns(self.model, True) == set()
        assert of_transformers.ignored_names(self.model, "save") == []
        assert of_transformers.has_parallel_plans(PreTrainedModel) == (transformers.__version__ >= "5.23")

    def test_the_attention_is_set_for_one_configuration(self):
        config = transformers.CLIPConfig()
        of_transformers.set_attention(config, "mhla")
        assert of_transformers.attention_of(config) == "mhla"
        assert of_transformers.attention_of(config.text_config) != "mhla"

    def test_modules_are_initialised_once(self):
        module, calls = torch.nn.Linear(1, 1), []
        for _ in range(2):
            of_transformers.initialize_once(module, calls.append)
        assert calls == [module]

    def test_names(self):
        state = self.model.state_dict()
        rules = of_transformers.renaming_rules(self.model)
        for name in state:
            assert of_transformers.loaded_name(name, rules, "model", state) == (name, False)
        of_transformers.keep_used_rules(self.model, rules)
        unique = of_transformers.without_tied(self.model, state)
        assert set(state) - set(unique) == {"lm_head.weight"}
        assert set(of_transformers.saved_tensors(self.model, unique)) == set(unique)

    def test_code(self):
        attention = self.model.model.layers[0].self_attn
        forward = type(attention).forward
        assert {"ALL_ATTENTION_FUNCTIONS", "apply_rotary_pos_emb"} <= of_transformers.names_used(forward)
        assert of_transformers.names_used(len) == set() and not of_transformers.reads_keywords(len)
        assert callable(of_transformers.global_of(forward, "apply_rotary_pos_emb"))
        assert of_transformers.global_of(forward, "no_such_name") is None
        assert of_transformers.reads_keywords(forward)
        assert not of_transformers.reads_keywords(torch.nn.Linear.forward)
        assert next(iter(compat.forward_parameters(attention))) == "hidden_states"
        assert of_transformers.rotation_conditions(forward) == ()
        assert of_transformers.source_of(len) == "" and "def forward" in of_transformers.source_of(forward)

    def test_conditions(self):
        def forward(self, query, use_rotary):
            if use_rotary:
                query = self.apply_rotary(query)
            return query

        assert of_transformers.rotation_conditions(forward) == ("use_rotary",)


class TestDiffusers:
    def test_declarations(self):
        assert of_diffusers.declared(WanTransformer3DModel, "_no_split_modules", "More") == [
            "WanTransformerBlock",
            "More",
        ]
        assert "time_embedder" in of_diffusers.fp32_parts(WanTransformer3DModel)
        plan = of_diffusers.context_parallel_plan(WanTransformer3DModel, "rope")
        assert plan and set(WanTransformer3DModel._cp_plan) - set(plan) == {"rope"}

    def test_loading_arguments_are_known_by_name(self):
        call = of_diffusers.loading_call(
            ModelMixin._load_pretrained_model, "model", {}, ["file"], "name", ["key"], dtype=None
        )
        assert call.arguments["pretrained_model_name_or_path"] == "name" and call.arguments["loaded_keys"] == ["key"]
        result = of_diffusers.load_weights(lambda *args, **kwargs: tuple(range(6)), call)
        assert result.model == 0 and result.offload_index == 4

    def test_pipelines(self):
        assert WanTransformer3DModel in of_diffusers.component_types(WanPipeline)["transformer"]
        assert of_diffusers.call_default(Called(), "steps") == 3
        pipeline = DiffusionPipeline()
        assert of_diffusers.progress_bar_options(pipeline) == {}
        pipeline.set_progress_bar_config(disable=True)
        assert of_diffusers.progress_bar_options(pipeline) == {"disable": True}

    def test_guiders_skip_registered_classes(self):
        class Processor:
            pass

        class Layer(torch.nn.Module):
            pass

        for _ in range(2):
            of_diffusers.skip_attention_in(Processor)
            of_diffusers.skip_layers_in(Layer)
        assert _helpers.AttentionProcessorRegistry.get(Processor).skip_processor_output_fn is not None
        assert _helpers.TransformerBlockRegistry.get(Layer).return_hidden_states_index == 0
        assert not of_diffusers.is_attention_skipped(Layer())

    def test_files(self):
        assert of_diffusers.loads_single_files("WanTransformer3DModel") and not of_diffusers.loads_single_files("None")
        assert of_diffusers.rename_wan_weights(["head.head.weight"]) == {"proj_out.weight": "head.head.weight"}
