# SPDX-License-Identifier: Apache-2.0
"""`ModelDirectory`: what a directory holds, and the original behind it."""

import pytest
import torch

from mhla_hf import convert_pretrained
from mhla_hf.models.directory import ModelDirectory
from tests import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A softmax pipeline and its conversion beside it; tests do not change them."""
    root = tmp_path_factory.mktemp("directories")
    tiny.wan_pipeline().save_pretrained(root / "softmax")
    convert_pretrained(root / "softmax", root / "mhla", blocks=(1, 2, 2), grid=(3, 2, 4), progress=False)
    return root


def test_a_pipeline(folders):
    softmax, mhla = (ModelDirectory.open(folders / name) for name in ("softmax", "mhla"))
    assert (softmax.kind, softmax.component, softmax.origin) == ("pipeline", "transformer", {"location": "softmax"})
    assert softmax.folder == folders / "softmax" / "transformer" and softmax.mhla_models == []
    assert (mhla.class_name, mhla.softmax_class_name) == ("MHLAWanTransformer3DModel", softmax.class_name)
    assert mhla.models == mhla.mhla_models == [mhla] == [mhla.select("transformer")]
    assert mhla.vae_compression == softmax.vae_compression is not None
    with pytest.raises(ValueError, match="component='vae' is not a component of .* that can be MHLA: transformer"):
        mhla.select("vae")
    alone = ModelDirectory.open(folders / "mhla" / "transformer")
    assert (alone.kind, alone.component, alone.vae_compression) == ("diffusers", "transformer", None)


def test_the_original_is_found_and_loaded(folders):
    mhla, softmax = (ModelDirectory.open(folders / name) for name in ("mhla", "softmax"))
    for found in (mhla.original(), mhla.original(folders / "softmax")):
        assert (found.folder, found.configs, found.origin) == (softmax.folder, softmax.configs, softmax.origin)
    assert softmax.original() is softmax
    kept, original = mhla.load().state_dict(), mhla.original().load().state_dict()
    assert all(torch.equal(kept[name], value) for name, value in original.items())
    with pytest.raises(ValueError, match=r"base .*mhla has no softmax model for transformer of"):
        mhla.original(folders / "mhla", "base")
