"""What `EngineConfig(batch_invariant=True)` costs on CPU: prompts and decoding with and without it, in turns.

    JAX_PLATFORMS=cpu python benchmarks/batch_invariance.py

Eight layers of Qwen3-0.6B's shape with a vocabulary of 32,000 and random weights. Prints the medians of five turns, in tokens per
second: four prompts of 512 tokens, and eight sequences that decode 32 tokens each.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from shapes.published import config_of

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams

VOCABULARY, TURNS = 32_000, 5


def _seconds(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - started


def main() -> None:
    """Print a row for each dtype."""
    config = config_of("qwen3-0.6b", vocab_size=VOCABULARY, num_hidden_layers=8)
    rng = np.random.default_rng(0)
    long, short = (rng.integers(5, VOCABULARY, shape).tolist() for shape in ((4, 512), (8, 4)))
    print(
        "| dtype | prompts | with batch_invariant | decoding | with batch_invariant |\n| --- | --- | --- | --- | --- |"
    )
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForTPU.from_config(config, dtype=dtype)
        engines = [
            Engine(
                model,
                config=EngineConfig(
                    batch_invariant=is_invariant, enable_prefix_caching=False, max_model_len=1024, max_num_seqs=8
                ),
            )
            for is_invariant in (False, True)
        ]
        found: dict[tuple[str, int], list[float]] = {}
        for engine in engines:
            engine.warm_up()
            _seconds(engine, long, 1)
        for _ in range(TURNS):
            for index, engine in enumerate(engines):
                found.setdefault(("prompts", index), []).append(4 * 512 / _seconds(engine, long, 1))
                found.setdefault(("decoding", index), []).append(8 * 32 / _seconds(engine, short, 32))
        cells = [f"{statistics.median(found[work, i]):.0f}" for work in ("prompts", "decoding") for i in (0, 1)]
        print(f"| {dtype} | {' | '.join(cells)} |", flush=True)
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
