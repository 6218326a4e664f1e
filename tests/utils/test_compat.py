# SPDX-License-Identifier: Apache-2.0
"""Each touch point of another library's internals: what it gives, and one plain line where the shape is unknown."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from types import SimpleNamespace

import pytest

from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.integrations.transformers.patch import install
from mhla_hf.training.parameters import check_takes_adapters
from mhla_hf.utils import compat
from mhla_hf.utils.compat import UnsupportedVersionError, wrap
from mhla_hf.utils.compat import diffusers as of_diffusers
from mhla_hf.utils.compat import transformers as of_transformers
from tests import ROOT
from tests.integrations.transformers.mhla_models import mhla_model
from tests.tiny import wan_transformer


NOTHING = SimpleNamespace(__name__="Nothing")


class Keys:
    missing_keys: set[str] = set()


class Nothing:
    """A class without anything that is looked for."""


def without(owner, name):
    """A change that takes a name from a module, given by its name, or from a class."""

    def change(monkeypatch):
        monkeypatch.delattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name)

    return change


def no_change(monkeypatch):
    pass


UNKNOWN = {
    "attention_of": (no_change, lambda: of_transformers.attention_of(NOTHING), "_attn_implementation"),
    "reported_names": (
        no_change, lambda: of_transformers.reported_names(SimpleNamespace(all_tied_weights_keys={}), Keys()),
        "_adjust_missing_and_unexpected_keys",
    ),
    "parallel_tools": (
        lambda monkeypatch: monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None),
        of_transformers.parallel_tools, "distributed.tensor_parallel.TensorParallelLayer",
    ),
    "loaded_name": (
        without("transformers.core_model_loading", "rename_source_key"),
        lambda: of_transformers.loaded_name("a", [], "", {}), "rename_source_key",
    ),
    "loading_call": (
        no_change, lambda: of_diffusers.loading_call(lambda model, path: None, 1, 2), "_load_pretrained_model",
    ),
    "skip_layers_in": (
        without("diffusers.hooks._helpers", "TransformerBlockMetadata"),
        lambda: of_diffusers.skip_layers_in(Nothing), "hooks._helpers.TransformerBlockMetadata",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_shape_is_named_in_one_line(name, monkeypatch):
    change, call, part = UNKNOWN[name]
    change(monkeypatch)
    with pytest.raises(UnsupportedVersionError) as caught:
        call()
    (line,) = str(caught.value).splitlines()
    library = "transformers" if hasattr(of_transformers, name) else "diffusers"
    assert line.startswith(f"{library} {importlib.import_module(library).__version__} does not have the known ")
    assert part in line and f"checked with {library} {compat.CHECKED[library]}" in line and "Install" in line


def trees(folder):
    for path in folder.rglob("*.py"):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_private_parts_are_touched_here_alone():
    here = ROOT / "mhla_hf/utils/compat"
    words = [node.value for _, tree in trees(here) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    private = {word for word in words if isinstance(word, str) and re.fullmatch("_[a-z]\\w+", word)}
    assert {"_keep_in_fp32_modules", "_attn_implementation", "_is_hf_initialized", "_cp_plan"} <= private
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


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_version_that_nobody_has_checked_is_noted_once(library, caplog, monkeypatch):
    def build():
        caplog.clear()
        compat.note_unchecked.cache_clear()
        for _ in range(2):
            mhla_model("llama") if library == "transformers" else wan_transformer(MHLAWanTransformer3DModel)
        return [record.getMessage() for record in caplog.records if record.name == compat.__name__]

    assert build() == []
    monkeypatch.setitem(compat.CHECKED, library, "0.1 and 0.2")
    (line,) = build()
    installed = importlib.import_module(library).__version__
    assert line.startswith(f"{library} {installed} is newer than 0.2, the newest that mhla_hf was checked with")
    assert f"pip install '{library}==0.2.*'" in line


def test_a_peft_that_transformers_refuses_is_told_in_one_line(monkeypatch):
    from transformers import LlamaForCausalLM
    from transformers.integrations import peft

    monkeypatch.setattr(peft, "MIN_PEFT_VERSION", "0.1")
    check_takes_adapters(LlamaForCausalLM)
    monkeypatch.setattr(peft, "MIN_PEFT_VERSION", "99.0")
    with pytest.raises(UnsupportedVersionError, match="adds LoRA with peft 99.0 or newer.*pip install 'peft>=99.0'"):
        check_takes_adapters(LlamaForCausalLM)


class TestWrap:
    def doubled(self, original, owner, value):
        return original(owner, 2 * value)

    def test_methods_and_class_methods_are_wrapped_once(self):
        class Owner:
            def method(self, value):
                return value

            @classmethod
            def made(cls, value):
                return cls.__name__, value

        class Derived(Owner):
            pass

        method = Owner.method
        for _ in range(2):
            wrap("library", Owner, "method", self.doubled)
            wrap("library", Owner, "made", self.doubled)
        assert Owner().method(3) == 6 and Derived.made(3) == ("Derived", 6)
        assert Owner.method.__wrapped__ is method


def test_no_model_is_changed_where_a_step_is_missing():
    class Model:
        post_init = _initialize_weights = lambda self: None

    before = dict(vars(Model))
    with pytest.raises(UnsupportedVersionError, match="PreTrainedModel._load_pretrained_model"):
        install(SimpleNamespace(PreTrainedModel=Model))
    assert dict(vars(Model)) == before
