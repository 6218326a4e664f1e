#!/usr/bin/env bash
# transformers 5.24.0: a model that is cast by `.to(torch.bfloat16)` computes something else than the same model reloaded.
#
# `.to` rounds `rotary_emb.inv_freq` to bfloat16, a buffer that is not saved; `from_pretrained` computes it in float32
# whatever the dtype of the weights. So save and reload changes the angles of RoPE, more for later tokens, although
# every saved tensor comes back bit by bit. `from_pretrained(dtype=torch.bfloat16)` is the cast that survives.
#
# Output seen (CPU, Python 3.11):
#   transformers 5.24.0: weights equal: True, inv_freq after .to bfloat16, after a reload float32, logits equal: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
model.save_pretrained(sys.argv[1])
again = LlamaForCausalLM.from_pretrained(sys.argv[1]).eval()
equal = all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
kinds = [str(one.model.rotary_emb.inv_freq.dtype).removeprefix("torch.") for one in (model, again)]
ids = torch.arange(64).repeat(1, 8)
with torch.no_grad():
    same = torch.equal(model(ids).logits, again(ids).logits)
print(
    f"transformers {transformers.__version__}: weights equal: {equal}, inv_freq after .to {kinds[0]}, "
    f"after a reload {kinds[1]}, logits equal: {same}"
)
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder/model" 2>/dev/null | tee "$folder/output"
grep -qF "weights equal: True, inv_freq after .to bfloat16, after a reload float32, logits equal: False" "$folder/output"
