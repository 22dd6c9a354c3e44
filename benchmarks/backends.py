"""The backend torch_xla beside transformers' own generate on the same device: `python benchmarks/backends.py [--json-file FILE]`.

In the environment of torch_xla, with an end-of-sequence id set, as every real model has it: without one, transformers' loop looks
cheap, since no step depends on the logits. Both start with nothing compiled.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
NEW = 24


def measure(who: str) -> dict:
    """Seconds, compilations and tokens of a first call; hfax's second one has another prompt of the same size class."""
    import torch
    import transformers

    from hfax import AutoModelForTPU
    from hfax.backends.torch_xla import runtime

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=255,
        pad_token_id=0,
    )
    ids = torch.randint(3, 250, (1, 12), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    if who == "hfax":
        model = AutoModelForTPU.from_config(config, backend="torch_xla", seed=0)

        def call(prompt: torch.Tensor) -> list:
            return model.generate(prompt, **options).tolist()
    else:
        torch.manual_seed(0)
        device = runtime.device()
        plain = transformers.LlamaForCausalLM(config).eval().to(device)

        def call(prompt: torch.Tensor) -> list:
            mask = torch.ones_like(prompt).to(device)
            return plain.generate(prompt.to(device), attention_mask=mask, **options).cpu().tolist()

    seconds, counts = [], []
    for prompt in (ids, ids[:, :10]) if who == "hfax" else (ids,):
        before, begin = runtime.counters(), time.perf_counter()
        tokens = call(prompt)
        seconds.append(time.perf_counter() - begin)
        counts.append(runtime.counters()["compilations"] - before["compilations"])
        if prompt is ids:
            first = tokens
    return {"seconds": seconds, "compilations": counts, "tokens": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.who:
        print(json.dumps(measure(arguments.who)))
        return
    results = {}
    for who in ("hfax", "transformers"):
        done = subprocess.run([sys.executable, __file__, "--who", who], capture_output=True, text=True, check=True)
        results[who] = json.loads(done.stdout.splitlines()[-1])
        calls = zip(results[who]["seconds"], results[who]["compilations"], strict=True)
        print(f"{who}: " + ", then ".join(f"{s:.2f} s ({n} compilations)" for s, n in calls))
    mine, theirs = results["hfax"], results["transformers"]
    print("same tokens:", mine["tokens"] == theirs["tokens"])
    print("ratio of the first calls:", round(theirs["seconds"][0] / mine["seconds"][0], 1))
    if arguments.json_file:
        arguments.json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
