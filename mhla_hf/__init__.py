# SPDX-License-Identifier: Apache-2.0
"""Multi-Head Linear Attention (arXiv 2601.07832) for transformers and diffusers.

Importing the package is cheap: names below are loaded when they are first used. diffusers learns the MHLA model
classes and transformers the attention implementation `"mhla"` when they are imported themselves, so that their plain
`from_pretrained` loads MHLA checkpoints.
"""

from __future__ import annotations

from .integrations.adapters import register_with_peft
from .integrations.diffusers.loading import guard_softmax_classes
from .integrations.diffusers.namespace import register_with_diffusers
from .integrations.transformers import register_with_transformers
from .utils.lazy import lazy_names
from .utils.versions import check_transformers


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
