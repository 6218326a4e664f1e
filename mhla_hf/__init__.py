# SPDX-License-Identifier: Apache-2.0
"""Multi-Head Linear Attention (arXiv 2601.07832) for transformers and diffusers.

Importing the package is cheap: names below are loaded when they are first used. diffusers learns the MHLA model
classes and transformers the attention implementation `"mhla"` when they are imported themselves, so that their plain
`from_pretrained` loads MHLA checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .integrations import register_with_peft
from .integrations.diffusers import register_with_diffusers
from .integrations.transformers import register_with_transformers
from .models.registry import MHLA_CLASSES
from .utils import lazy_names
from .utils.compat import check_version


if TYPE_CHECKING:
    from .config import MHLAConfig as MHLAConfig
    from .conversion import convert_pretrained as convert_pretrained
    from .conversion import import_official as import_official
    from .families.dit import MHLADiTTransformer2DModel as MHLADiTTransformer2DModel
    from .families.dit import MHLAPixArtTransformer2DModel as MHLAPixArtTransformer2DModel
    from .families.flux import MHLAChromaTransformer2DModel as MHLAChromaTransformer2DModel
    from .families.flux import MHLAFluxTransformer2DModel as MHLAFluxTransformer2DModel
    from .families.hunyuan_video import MHLAHunyuanVideo15Transformer3DModel as MHLAHunyuanVideo15Transformer3DModel
    from .families.hunyuan_video import MHLAHunyuanVideoTransformer3DModel as MHLAHunyuanVideoTransformer3DModel
    from .families.ltx import MHLALTX2VideoTransformer3DModel as MHLALTX2VideoTransformer3DModel
    from .families.ltx import MHLALTXVideoTransformer3DModel as MHLALTXVideoTransformer3DModel
    from .families.qwen_image import MHLAQwenImageTransformer2DModel as MHLAQwenImageTransformer2DModel
    from .families.sana import MHLASanaTransformer2DModel as MHLASanaTransformer2DModel
    from .families.sana import MHLASanaVideoTransformer3DModel as MHLASanaVideoTransformer3DModel
    from .families.sd3 import MHLASD3Transformer2DModel as MHLASD3Transformer2DModel
    from .families.wan import MHLASkyReelsV2Transformer3DModel as MHLASkyReelsV2Transformer3DModel
    from .families.wan import MHLAWanAnimateTransformer3DModel as MHLAWanAnimateTransformer3DModel
    from .families.wan import MHLAWanTransformer3DModel as MHLAWanTransformer3DModel
    from .families.wan import MHLAWanVACETransformer3DModel as MHLAWanVACETransformer3DModel
    from .integrations.transformers.cache import MHLACache as MHLACache
    from .layers.mhla import MHLA as MHLA
    from .layouts.blocks import BlockLayout as BlockLayout
    from .layouts.resampling import resample_mixing as resample_mixing
    from .models.registry import supported_models as supported_models
    from .ops import mhla_attention as mhla_attention
    from .pipelines import convert as convert
    from .pipelines import load_pipeline as load_pipeline
    from .pipelines import unconvert as unconvert
    from .presets import from_preset as from_preset
    from .recovery.calibration import calibrate as calibrate
    from .recovery.recover import recover as recover

__version__ = "0.1.0"

_needs = {
    "MHLACache": partial(check_version, "transformers"),
    **dict.fromkeys(MHLA_CLASSES, partial(check_version, "diffusers")),
}
__getattr__, __dir__, __all__ = lazy_names(__name__, "__version__", needs=_needs)

register_with_diffusers()
register_with_transformers()
register_with_peft()
