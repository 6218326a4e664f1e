# SPDX-License-Identifier: Apache-2.0
"""Multi-Head Linear Attention (arXiv 2601.07832) for transformers and diffusers.

Importing the package is cheap: names below are loaded when they are first used. diffusers learns the MHLA model
classes and transformers the attention implementation `"mhla"` when they are imported themselves, so that their plain
`from_pretrained` loads MHLA checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .integrations.adapters import register_with_peft
from .integrations.diffusers.loading import guard_softmax_classes
from .integrations.diffusers.namespace import register_with_diffusers
from .integrations.transformers import register_with_transformers
from .utils.lazy import lazy_names
from .utils.versions import check_transformers


if TYPE_CHECKING:
    from .config import MHLAConfig as MHLAConfig
    from .conversion import convert_pretrained as convert_pretrained
    from .conversion import import_official as import_official
    from .integrations.transformers.cache import MHLACache as MHLACache
    from .layers.mhla import MHLA as MHLA
    from .layouts.blocks import BlockLayout as BlockLayout
    from .layouts.resampling import resample_mixing as resample_mixing
    from .models.dit import MHLADiTTransformer2DModel as MHLADiTTransformer2DModel
    from .models.pixart import MHLAPixArtTransformer2DModel as MHLAPixArtTransformer2DModel
    from .models.registry import supported_models as supported_models
    from .models.sana import MHLASanaTransformer2DModel as MHLASanaTransformer2DModel
    from .models.sana_video import MHLASanaVideoTransformer3DModel as MHLASanaVideoTransformer3DModel
    from .models.wan import MHLAWanTransformer3DModel as MHLAWanTransformer3DModel
    from .ops import mhla_attention as mhla_attention
    from .pipelines import convert as convert
    from .pipelines import load_pipeline as load_pipeline
    from .presets import from_preset as from_preset
    from .recovery.calibration import calibrate as calibrate
    from .recovery.recover import recover as recover

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "BlockLayout": "layouts.blocks",
    "MHLA": "layers.mhla",
    "MHLACache": "integrations.transformers.cache",
    "MHLAConfig": "config",
    "MHLADiTTransformer2DModel": "models.dit",
    "MHLAPixArtTransformer2DModel": "models.pixart",
    "MHLASanaTransformer2DModel": "models.sana",
    "MHLASanaVideoTransformer3DModel": "models.sana_video",
    "MHLAWanTransformer3DModel": "models.wan",
    "calibrate": "recovery.calibration",
    "convert": "pipelines",
    "convert_pretrained": "conversion",
    "from_preset": "presets",
    "import_official": "conversion",
    "load_pipeline": "pipelines",
    "mhla_attention": "ops",
    "recover": "recovery.recover",
    "resample_mixing": "layouts.resampling",
    "supported_models": "models.registry",
}

__all__ = ["__version__", *sorted(_PUBLIC_NAMES)]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)

check_transformers()
register_with_diffusers()
guard_softmax_classes()
register_with_transformers()
register_with_peft()
