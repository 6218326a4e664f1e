#!/usr/bin/env bash
# transformers 5.24.0, released in November 2026: no forward pass of Llama4ForConditionalGeneration returns.
#
# Its forward copies `image_outputs` from the output of its language model, which is a Llama4ForCausalLM and has no such
# field: AttributeError for text alone, and for every other input. 5.23.0 returns logits for the same model and tokens.
# A converted or a softmax Llama 4 cannot be used with 5.24.0; Llama4ForCausalLM, the text model alone, works in both.
#
# Output seen (CPU, Python 3.11):
#   transformers 5.23.0: logits (1, 5, 64)
#   transformers 5.24.0: AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 pillow==12.3.0 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import torch
import transformers
from transformers import Llama4Config, Llama4ForConditionalGeneration

text = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=2, pad_token_id=0,
)
vision = dict(
    hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
    projector_input_dim=32, projector_output_dim=32, vision_output_dim=32,
)
config = Llama4Config(text_config=text, vision_config=vision, boi_token_index=60, eoi_token_index=61, image_token_index=62)
model = Llama4ForConditionalGeneration(config).eval()
try:
    with torch.no_grad():
        found = f"logits {tuple(model(input_ids=torch.arange(5, 10)[None]).logits.shape)}"
except AttributeError as error:
    found = f"AttributeError: {error}"
print(f"transformers {transformers.__version__}: {found}")
PROGRAM
for version in 5.23.0 5.24.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==$version" 2>/dev/null
    "$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee -a "$folder/output"
done
grep -qF "5.23.0: logits (1, 5, 64)" "$folder/output"
grep -qF "5.24.0: AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'" "$folder/output"
