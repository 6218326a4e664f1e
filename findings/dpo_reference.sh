#!/usr/bin/env bash
# trl 1.16.0: the reference of DPO is read from where the model once came from, not copied from the model that is given.
#
# Without `ref_model`, `DPOTrainer` loads a second model by the name in the first one's configuration. A model that has
# been changed since it was loaded (converted, trained, merged with adapters, with other embeddings) then starts with
# rewards that are not zero: it is compared with what it was before. `ref_model=copy.deepcopy(model)` says what is meant.
#
# Output seen (CPU, Python 3.11):
#   trl 1.16.0: weights of the reference equal those of the model: False; those of the directory it came from: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 trl==1.16.0 transformers==5.23.0 \
    accelerate==1.15.0 datasets==5.2.0 numpy==2.4.6 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer


folder = sys.argv[1]
letters = {letter: index for index, letter in enumerate(["<pad>", "<eos>", *"abcdefghij"])}
tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=12)
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    model.lm_head.weight.mul_(2)
rows = [{"prompt": "abc", "chosen": "def", "rejected": "ghi"}] * 4
options = DPOConfig(output_dir=f"{folder}/run", report_to=[], use_cpu=True, bf16=False)
trainer = DPOTrainer(model, args=options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
reference, given = trainer.ref_model.lm_head.weight, model.lm_head.weight
origin = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
print(
    f"trl {version('trl')}: weights of the reference equal those of the model: {torch.equal(reference, given)}; "
    f"those of the directory it came from: {torch.equal(reference, origin)}"
)
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder/model" 2>/dev/null | tee "$folder/output"
grep -qF "equal those of the model: False; those of the directory it came from: True" "$folder/output"
