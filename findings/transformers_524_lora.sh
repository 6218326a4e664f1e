#!/usr/bin/env bash
# transformers 5.24.0 and peft 0.21.2, the newest releases of both on 2026-11-28: `add_adapter` refuses LoRA.
#
# transformers 5.24.0 asks for peft 0.22.0, which has not been published. `model.add_adapter`, `set_adapter` and
# `disable_adapters` raise a ValueError for every model; peft's own `get_peft_model` and `load_adapter` still work.
# 5.23.0 takes the same peft.
#
# Output seen (CPU, Python 3.11):
#   transformers 5.23.0, peft 0.21.2: add_adapter adds 4 tensors
#   transformers 5.24.0, peft 0.21.2: ValueError: The version of PEFT you are using is not compatible, please use a version >= 0.22.0
#   transformers 5.24.0, peft 0.21.2: get_peft_model adds 4 tensors
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 peft==0.21.2 accelerate==1.15.0 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import peft
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

versions = f"transformers {transformers.__version__}, peft {peft.__version__}"
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


def added(model):
    return sum("lora_" in name for name, _ in model.named_parameters())


model = LlamaForCausalLM(LlamaConfig(**sizes))
try:
    model.add_adapter(lora)
    print(f"{versions}: add_adapter adds {added(model)} tensors")
except ValueError as error:
    print(f"{versions}: ValueError: {error}")
    print(f"{versions}: get_peft_model adds {added(get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), lora))} tensors")
PROGRAM
for version in 5.23.0 5.24.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==$version" 2>/dev/null
    "$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee -a "$folder/output"
done
grep -qF "5.23.0, peft 0.21.2: add_adapter adds 4 tensors" "$folder/output"
grep -qF "5.24.0, peft 0.21.2: ValueError: The version of PEFT you are using is not compatible, please use a version >= 0.22.0" "$folder/output"
grep -qF "5.24.0, peft 0.21.2: get_peft_model adds 4 tensors" "$folder/output"
