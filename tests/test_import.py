# SPDX-License-Identifier: Apache-2.0
"""Importing the package: cheap, and without effect on anything but the namespace of diffusers."""

import json
import sys

import pytest

import mhla_hf
from mhla_hf.models.registry import MHLA_CLASSES
from tests.processes import run_program


def run(program: str) -> dict:
    """What a program prints last, a line of JSON."""
    return json.loads(run_program(program).stdout.splitlines()[-1])


def test_import_is_cheap():
    report = run(
        """
        import json, sys, time
        start = time.process_time()
        import mhla_hf
        seconds = time.process_time() - start
        heavy = [name for name in ("torch", "diffusers", "transformers", "numpy", "peft") if name in sys.modules]
        names = dir(mhla_hf)
        mhla_hf.MHLAConfig(blocks=(3, 5, 10))
        assert "torch" not in sys.modules
        print(json.dumps({"heavy": heavy, "seconds": seconds, "names": names, "version": mhla_hf.__version__}))
        """
    )
    assert report["heavy"] == []
    assert report["seconds"] < 0.3
    assert set(mhla_hf.__all__) <= set(report["names"])
    assert report["version"] == mhla_hf.__version__


REPORT = """
        def report():
            import diffusers
            from diffusers import WanTransformer3DModel

            sizes = dict(num_attention_heads=2, attention_head_dim=12, text_dim=8, ffn_dim=8, num_layers=1)
            model = WanTransformer3DModel(**sizes)
            processors = sorted(type(processor).__name__ for processor in model.attn_processors.values())
            return dict(
                names=sorted(set(dir(diffusers))), keys=sorted(model.state_dict()), processors=processors,
                rope=type(model.rope).__name__, attention=type(model.blocks[0].attn1).__name__,
                plan=sorted(WanTransformer3DModel._cp_plan), kept=WanTransformer3DModel._keep_in_fp32_modules,
                config=sorted(model.config), module=WanTransformer3DModel.__module__,
                found=getattr(getattr(diffusers, "MHLAWanTransformer3DModel", None), "__name__", None),
            )
"""


@pytest.mark.slow
def test_diffusers_is_the_same_but_for_the_new_names():
    imported_last = run(
        f"""
        import json
        {REPORT}
        stock = report()
        import mhla_hf
        print(json.dumps([stock, report()]))
        """
    )
    imported_first = run(
        f"""
        import importlib.util, json
        import mhla_hf
        # Other libraries look for diffusers without importing it; that must not use up the hook.
        assert importlib.util.find_spec("diffusers") is not None
        {REPORT}
        print(json.dumps(report()))
        """
    )
    stock, last = imported_last
    assert stock.pop("found") is None
    for after in (last, imported_first):
        assert after.pop("found") == "MHLAWanTransformer3DModel"
        assert set(after["names"]) - set(stock["names"]) == set(MHLA_CLASSES)
        assert {**after, "names": None} == {**stock, "names": None}


def test_public_names_resolve_and_unknown_ones_do_not():
    for name in mhla_hf.__all__:
        assert getattr(mhla_hf, name) is not None, name
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(mhla_hf, "no_such_name")  # noqa: B009
    import diffusers

    for name in MHLA_CLASSES:
        assert getattr(diffusers, name) is getattr(mhla_hf, name)
        assert getattr(mhla_hf, name).__module__ == "mhla_hf"
    with pytest.raises(AttributeError):
        getattr(diffusers, "no_such_name")  # noqa: B009


def test_registration_happens_once():
    import diffusers

    from mhla_hf.integrations.diffusers import register_with_diffusers

    before = type(diffusers)
    register_with_diffusers()
    assert type(diffusers) is before
    assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_DiffusersImportHook"]
