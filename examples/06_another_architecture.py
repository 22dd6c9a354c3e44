"""The same call for other architectures: a small random model of each, compared with plain transformers.

python examples/06_another_architecture.py [MODEL_TYPE ...]
"""

import sys
import tempfile

import torch
import transformers

from hfax import AutoModelForTPU
from hfax.synthetic.shrink import shrink_config

ids = torch.tensor([[5, 17, 40, 8, 61, 33, 90, 12]])
for model_type in sys.argv[1:] or ["gpt2", "qwen3_moe", "mamba", "gemma3_text"]:
    config = shrink_config(transformers.CONFIG_MAPPING[model_type]())
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        model = AutoModelForTPU.from_pretrained(folder)
        with torch.no_grad():
            error = (model(ids).logits - plain(ids).logits).abs().max() / plain(ids).logits.abs().max()
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    print(
        f"{model_type:12} {model.num_parameters():9,} parameters  differs by {error:.0e}  writes {tokens[0, 8:].tolist()}"
    )
