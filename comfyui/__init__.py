# SPDX-License-Identifier: Apache-2.0
"""ComfyUI nodes that load MHLA pipelines of diffusers, generate with them and save the frames.

They follow ComfyUI's first node contract (`NODE_CLASS_MAPPINGS`), which every version of ComfyUI reads; `comfy_api`,
the newer one, is still changing and offers nothing that these nodes need.
"""

from .nodes import LoadPipeline, Sample
from .saving import SaveFrames


NODE_CLASS_MAPPINGS = {
    "MHLALoadPipeline": LoadPipeline,
    "MHLASample": Sample,
    "MHLASaveFrames": SaveFrames,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "MHLALoadPipeline": "Load MHLA Pipeline",
    "MHLASample": "Generate with MHLA Pipeline",
    "MHLASaveFrames": "Save Frames",
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
