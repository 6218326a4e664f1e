# SPDX-License-Identifier: Apache-2.0
"""A case of every class, for tests that are no family's own."""

from tests.families.test_dit import DiTCase, PixArtCase
from tests.families.test_flux import ChromaCase, FluxCase
from tests.families.test_hunyuan_video import HunyuanVideo15Case, HunyuanVideoCase
from tests.families.test_ltx import LTX2Case, LTXCase
from tests.families.test_ltx import LTX23Case as LTX23Case
from tests.families.test_qwen_image import QwenImageCase
from tests.families.test_sana import SanaCase, SanaVideoCase
from tests.families.test_sd3 import SD3Case
from tests.families.test_wan import SkyReelsCase, WanAnimateCase, WanCase, WanVACECase
from tests.families.test_wan import WanImageToVideoCase as WanImageToVideoCase


CASES = [
    WanCase(), DiTCase(), PixArtCase(), SanaCase(), SanaVideoCase(), WanVACECase(), WanAnimateCase(), SkyReelsCase(),
    LTXCase(), LTX2Case(), HunyuanVideoCase(), HunyuanVideo15Case(), QwenImageCase(), FluxCase(), ChromaCase(),
    SD3Case(),
]  # fmt: skip
