#!/usr/bin/env bash
# diffusers 0.42.1: `DiffusionPipeline.from_pretrained(folder, transformer=mine)` loads the transformer of the folder.
#
# A component that a pipeline class declares as optional, as WanPipeline does its two transformers, is taken only where
# that class itself is asked: the base class looks into its own list of optional components, which is empty, warns that
# the argument is not expected, and loads what the folder holds. `WanPipeline.from_pretrained(folder, transformer=mine)`
# uses the model that it is given, and both do so for the components that are not optional.
#
# Output seen (CPU, Python 3.11):
#   diffusers 0.42.1: DiffusionPipeline uses the given transformer: False, the given vae: True
#   diffusers 0.42.1: WanPipeline uses the given transformer: True, the given vae: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 ftfy==6.3.1 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import sys

import diffusers
from diffusers import AutoencoderKLWan, DiffusionPipeline, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel


def models():
    transformer = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=8, ffn_dim=8, num_layers=1, in_channels=4, out_channels=4
    )
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    return {"transformer": transformer, "vae": vae}


scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
WanPipeline(tokenizer=None, text_encoder=None, scheduler=scheduler, **models()).save_pretrained(sys.argv[1])
for pipeline_class in (DiffusionPipeline, WanPipeline):
    mine = models()
    pipeline = pipeline_class.from_pretrained(sys.argv[1], tokenizer=None, text_encoder=None, **mine)
    used = ", ".join(f"the given {name}: {getattr(pipeline, name) is model}" for name, model in mine.items())
    print(f"diffusers {diffusers.__version__}: {pipeline_class.__name__} uses {used}")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder/pipeline" 2>"$folder/errors" | tee "$folder/output" || tail -3 "$folder/errors"
grep -qF "DiffusionPipeline uses the given transformer: False, the given vae: True" "$folder/output"
grep -qF "WanPipeline uses the given transformer: True, the given vae: True" "$folder/output"
