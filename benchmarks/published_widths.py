"""Architectures at the width of their default configuration, mostly a published model's, beside transformers in float32.

    python benchmarks/published_widths.py --json-file benchmarks/results/published-widths.json

Small random models have small heads and even vocabularies. Here hidden sizes, heads, vocabularies and experts' widths are the
published ones; there is one layer of each kind (two at least), and eight experts at most. Weights are random. Each architecture has
a process of its own: the logits of a padded batch, and eight greedy tokens with their scores. Errors are the largest difference,
over the standard deviation of the logits. An architecture of more than 1.95 billion weights is left out, by name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ARCHITECTURES = [
    *(
        "llama",
        "mistral",
        "gemma",
        "gemma2",
        "gemma3_text",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen2_moe",
        "phi",
        "phi3",
        "falcon",
    ),
    *(
        "gpt2",
        "gpt_neox",
        "gptj",
        "gpt_neo",
        "bloom",
        "opt",
        "mpt",
        "stablelm",
        "olmo",
        "olmo2",
        "olmo3",
        "starcoder2",
        "glm",
        "glm4",
    ),
    *(
        "granite",
        "granitemoe",
        "persimmon",
        "codegen",
        "gpt_oss",
        "smollm3",
        "exaone4",
        "ernie4_5",
        "helium",
        "mamba",
        "mamba2",
    ),
    *(
        "falcon_h1",
        "falcon_mamba",
        "recurrent_gemma",
        "qwen3_next",
        "lfm2",
        "bamba",
        "rwkv",
        "xglm",
        "biogpt",
        "gpt_bigcode",
    ),
    *("arcee", "apertus", "olmoe", "phimoe", "bitnet", "nanochat", "diffllama", "doge"),
    *("vaultgemma", "jetmoe"),
]
MOST = 1_950_000_000
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "attention_layers")
NEW = 8


def _config(model_type: str) -> Any:
    """The default configuration with fewer layers and experts."""
    import transformers

    from hfax.synthetic.kept_layers import kept_layers

    config = transformers.AutoConfig.for_model(model_type)
    count = config.num_hidden_layers
    layers = kept_layers(config.to_dict()) or [0, 1]
    for name in BY_LAYER:
        values = getattr(config, name, None)
        if isinstance(values, (list, tuple)) and len(values) == count:
            with contextlib.suppress(AttributeError):  # derived from other fields
                setattr(config, name, [values[i] for i in layers])
    config.num_hidden_layers = len(layers)
    for name in EXPERTS:
        if (getattr(config, name, None) or 0) > 8:
            setattr(config, name, 8)
    if (getattr(config, "num_experts_per_tok", None) or 0) > 4:
        config.num_experts_per_tok = 4
    return config


def _compare(model_type: str) -> dict[str, Any]:
    import numpy as np
    import torch
    import transformers

    from hfax import AutoModelForTPU

    config = _config(model_type)
    with torch.device("meta"):
        count = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    about = {
        "hidden_size": config.hidden_size,
        "heads": getattr(config, "num_attention_heads", None),
        "vocabulary": config.vocab_size,
        "layers": config.num_hidden_layers,
        "parameters": count,
    }
    if count > MOST:
        return {**about, "left_out": "too large for this machine"}
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(5, min(config.vocab_size, 30_000), (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if getattr(config, "model_type", "") not in ("mamba", "falcon_mamba", "rwkv"):
        mask[1, :13] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    options: dict[str, Any] = {
        "use_cache": model_type != "rwkv",  # transformers' own steps mix the rows of a batch
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    with torch.no_grad():
        logits, expected = plain(**inputs).logits, plain.generate(**inputs, **options)
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        del plain
        model = AutoModelForTPU.from_pretrained(folder, dtype="float32")
        found_logits = model(**inputs).logits
        found = model.generate(**inputs, **options)
    scale = logits[mask.bool()].std().item()
    scores = [
        np.abs(a - b)[np.isfinite(b)].max()
        for a, b in zip(map(np.asarray, found.scores), map(np.asarray, expected.scores), strict=True)
    ]
    return {
        **about,
        "same_tokens": bool((found.sequences == expected.sequences).all()),
        "logits_error": float((found_logits - logits)[mask.bool()].abs().max()) / scale,
        "scores_error": float(max(scores)) / scale,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("architectures", nargs="*", default=ARCHITECTURES, metavar="MODEL_TYPE")
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_compare(arguments.one)))
        return
    rows: dict[str, Any] = {}
    for name in arguments.architectures:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=900)
        last = (done.stdout.strip() or done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        rows[name] = json.loads(last) if done.returncode == 0 else {"failed": last[:300]}
        print(name, json.dumps(rows[name]), flush=True)
        if arguments.json_file:
            arguments.json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
