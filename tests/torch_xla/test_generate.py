"""The backend "torch_xla" writes what plain transformers writes, and compiles two programs for it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import tiny_models
import torch
import transformers
from transformers.generation import logits_process

import hfax
from hfax import AutoModelForTPU
from hfax.backends.torch_xla import runtime
from hfax.errors import InvalidInputError, UnsupportedModelError, UnsupportedOptionError

NEW = 12
SIZES = {**tiny_models.SIZES, "vocab_size": 128, "initializer_range": 0.3, "eos_token_id": 2}
CONFIGS = {
    "llama": tiny_models.tiny_llama_config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=6),
    "gpt2": transformers.GPT2Config(
        vocab_size=128,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "mamba": transformers.MambaConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, initializer_range=0.3, eos_token_id=2, pad_token_id=0
    ),
    "t5": transformers.T5Config(
        vocab_size=128,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        initializer_factor=5.0,
        decoder_start_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    ),
}


def save(config: transformers.PretrainedConfig, folder: Path) -> transformers.PreTrainedModel:
    """A model of plain transformers, on disk."""
    reference = tiny_models.random_model(config, attn_implementation="eager")
    tiny_models.save(folder, reference)
    return reference


def prompts(rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """The first row is shorter, padded on the left."""
    ids = torch.from_numpy(np.random.default_rng(3).integers(3, 120, (rows, length)))
    mask = torch.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("llama")
    reference = save(CONFIGS["llama"], folder)
    return AutoModelForTPU.from_pretrained(folder, backend="torch_xla"), reference, folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save(CONFIGS[name], tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="torch_xla")
    inputs = prompts()
    wanted = reference.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    before = runtime.counters()["compilations"]
    found = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert found.dtype == torch.int64
    assert found.tolist() == wanted.tolist()
    assert runtime.counters()["compilations"] - before <= 3
    # another length of the same size class, and fewer tokens of the same cache
    before = runtime.counters()["compilations"]
    shorter = {key: value[:, 1:] for key, value in inputs.items()}
    found = model.generate(**shorter, max_new_tokens=NEW - 2, do_sample=False)
    assert runtime.counters()["compilations"] == before
    assert found.tolist() == reference.generate(**shorter, max_new_tokens=NEW - 2, do_sample=False).tolist()
    forward = {"input_ids": inputs["input_ids"][1:], "attention_mask": inputs["attention_mask"][1:]}
    if name == "t5":
        forward["decoder_input_ids"] = torch.tensor([[0, 5, 6]])
    if name == "mamba":
        forward.pop("attention_mask")
    np.testing.assert_allclose(model(**forward).logits, reference(**forward).logits.detach(), atol=2e-4)


def test_the_end_of_a_text(llama: tuple) -> None:
    model, reference, _ = llama
    inputs = prompts(4)
    plain = reference.generate(**inputs, max_new_tokens=40, do_sample=False, eos_token_id=None)
    end = int(plain[1, 9 + 7])  # row 1 ends there
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [end]}
    assert model.generate(**inputs, **options).tolist() == reference.generate(**inputs, **options).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"bad_words_ids": [[5], [7, 8]], "suppress_tokens": [9, 10], "exponential_decay_length_penalty": (3, 1.7)},
        {"min_new_tokens": 8, "eos_token_id": [2, 33], "forced_eos_token_id": 2},
    ],
    ids=["the tokens seen", "the step", "lengths"],
)
def test_the_loop_tells_the_processors_what_they_read(llama: tuple, options: dict) -> None:
    """What they make of it is in test_sampling.py."""
    model, reference, _ = llama
    inputs = prompts()
    given = {"max_new_tokens": NEW, "do_sample": False, **options}
    assert model.generate(**inputs, **given)[1].tolist() == reference.generate(**inputs, **given)[1].tolist()


def test_the_loop_tells_the_processors_where_the_text_ends(llama: tuple) -> None:
    """The pair that greedy search would write at its sixth token is a bad word."""
    model, reference, _ = llama
    ids = prompts()["input_ids"][1:]
    plain = reference.generate(ids, max_new_tokens=NEW, do_sample=False)[0].tolist()
    given = {"max_new_tokens": NEW, "do_sample": False, "bad_words_ids": [plain[13:15]]}
    wanted = reference.generate(ids, **given)[0].tolist()
    assert wanted != plain
    assert model.generate(ids, **given)[0].tolist() == wanted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7, "top_k": 0},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
        {"typical_p": 0.7},
        {"eta_cutoff": 0.02},
        {"min_p": 0.1},
    ],
)
def test_the_distribution_of_draws(llama: tuple, options: dict) -> None:
    model, reference, _ = llama
    ids = prompts()["input_ids"][1:]
    number = 3000
    given = {
        "max_new_tokens": 1,
        "do_sample": True,
        "num_return_sequences": number,
        "temperature": 3.0,
        "top_k": 0,
        **options,
    }
    drawn = model.generate(ids, **given, seed=5)[:, -1].numpy()
    scores = reference.generate(
        ids, **{**given, "num_return_sequences": 1}, return_dict_in_generate=True, output_scores=True
    ).scores[0][0]
    expected = torch.softmax(scores.double(), dim=-1).numpy() * number
    assert set(np.unique(drawn)) <= set(np.flatnonzero(expected))
    counts = np.bincount(drawn, minlength=128)
    large = expected >= 5
    observed, wanted = (
        np.append(counts[large], counts[~large].sum()),
        np.append(expected[large], expected[~large].sum()),
    )
    kept = wanted > 0
    assert scipy.stats.chisquare(observed[kept], wanted[kept] * observed[kept].sum() / wanted[kept].sum()).pvalue > 1e-4
    assert (model.generate(ids, **given, seed=5)[:, -1].numpy() == drawn).all()
    assert (model.generate(ids, **given, seed=6)[:, -1].numpy() != drawn).any()


def _python(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores - 3 * torch.nn.functional.one_hot(input_ids[:, -3:], scores.shape[1]).sum(dim=1)


def test_the_callers_processors_and_criteria(llama: tuple) -> None:
    model, plain, _ = llama
    given = {
        "logits_processor": transformers.LogitsProcessorList(
            [logits_process.RepetitionPenaltyLogitsProcessor(1.3), _python, logits_process.TopKLogitsWarper(30)]
        ),
        "prefix_allowed_tokens_fn": lambda prompt, ids: [(int(ids[-1]) + prompt + n) % 128 for n in range(1, 90, 2)],
        "stopping_criteria": transformers.StoppingCriteriaList([lambda ids, scores: ids[:, 9:].sum(dim=1) > 400]),
    }
    for names in ([*given], ["logits_processor"], ["prefix_allowed_tokens_fn"], ["stopping_criteria"]):
        options = {"max_new_tokens": NEW, "do_sample": False, **{n: given[n] for n in names}}
        theirs = plain.generate(**prompts(), **options)
        assert model.generate(**prompts(), **options).tolist() == theirs.tolist()
    marked = lambda ids, scores: scores  # noqa: E731
    marked.keyed = None  # as on hfax.device_processor, which needs JAX
    with pytest.raises(UnsupportedOptionError, match="device_processor"):
        model.generate(**prompts(), max_new_tokens=2, logits_processor=[marked])


def test_records_streams_and_stop_strings(llama: tuple) -> None:
    model, reference, _ = llama
    ids = prompts()["input_ids"][1:]
    given = {
        "max_new_tokens": 5,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    found, wanted = model.generate(ids, **given), reference.generate(ids, **given)
    assert found.sequences.tolist() == wanted.sequences.tolist()
    for name in ("scores", "logits"):
        for one, other in zip(found[name], wanted[name], strict=True):
            np.testing.assert_allclose(one, other, atol=2e-4)

    class Streamer:
        def __init__(self) -> None:
            self.got: list = []

        def put(self, value: torch.Tensor) -> None:
            self.got += value.reshape(-1).tolist()

        def end(self) -> None:
            self.got.append("end")

    streamer = Streamer()
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, streamer=streamer)[0].tolist()
    assert streamer.got == [*tokens, "end"]

    class Tokenizer:
        def decode(self, ids: list[int], **_: object) -> str:
            return "".join(f"<{i}>" for i in ids)

    with pytest.raises(InvalidInputError, match="streamer was passed for 2 sequences"):
        model.generate(**prompts(), max_new_tokens=6, streamer=streamer)
    stopped = model.generate(
        ids, max_new_tokens=6, do_sample=False, stop_strings=f"<{tokens[11]}>", tokenizer=Tokenizer()
    )
    assert stopped[0].tolist() == tokens[:12]


def test_saved_and_read_by_transformers(llama: tuple, tmp_path: Path) -> None:
    model, reference, _ = llama
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(again[name], tensor)


def test_the_module_is_torchs_own(llama: tuple) -> None:
    """Hooks see the model's parts, and what is on the device stays there."""
    model, _, _ = llama
    seen = []
    hook = model.module.model.layers[0].register_forward_hook(lambda module, args, out: seen.append(out))
    ids = prompts()["input_ids"].to(model.xla_device)
    logits = model(input_ids=ids).logits
    hook.remove()
    assert len(seen) == 1
    assert logits.device.type == "xla"
    assert model.device == torch.device("cpu")


def test_random_weights_are_those_of_transformers() -> None:
    config = transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
    model = AutoModelForTPU.from_config(config, backend="torch_xla", seed=4)
    torch.manual_seed(4)
    reference = transformers.Qwen3ForCausalLM._from_config(config).eval()
    ids = prompts()["input_ids"][1:]
    np.testing.assert_allclose(model(input_ids=ids).logits, reference(ids).logits.detach(), atol=2e-4)
    assert model.num_parameters() == sum(p.numel() for p in reference.parameters())


def test_auto_takes_what_works() -> None:
    try:
        import jax  # noqa: F401
    except ImportError:
        assert AutoModelForTPU.from_config(CONFIGS["llama"], backend="auto").backend == "torch_xla"
    with pytest.raises(InvalidInputError, match="no backend 'tpu'"):
        AutoModelForTPU.from_config(CONFIGS["llama"], backend="tpu")


def test_what_this_backend_lacks_names_the_other(llama: tuple) -> None:
    model, _, folder = llama
    for name in ("apply", "params", "compile", "map"):
        with pytest.raises(UnsupportedOptionError, match='backend="jax"'):
            getattr(model, name)
    with pytest.raises(UnsupportedOptionError, match="does not support quantization"):
        AutoModelForTPU.from_pretrained(folder, backend="torch_xla", quantization="int8")
    with pytest.raises(UnsupportedOptionError, match="does not support plan"):
        AutoModelForTPU.from_pretrained(folder, backend="torch_xla", plan="plan.json")
    with pytest.raises(InvalidInputError, match="needs 2 devices; there are 1"):
        AutoModelForTPU.from_pretrained(folder, backend="torch_xla", parallelism={"tensor": 2})
    ids = prompts()["input_ids"][1:]
    with pytest.raises(UnsupportedOptionError, match="penalty_alpha"):
        model.generate(ids, penalty_alpha=0.5, top_k=4, max_new_tokens=3)
    with pytest.raises(UnsupportedOptionError, match=r"num_beams=4: .* does not support beam search"):
        model.generate(ids, num_beams=4, max_new_tokens=3)
    with pytest.raises(UnsupportedOptionError, match="does not support speculative"):
        model.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=3)
    with pytest.raises(InvalidInputError, match="vocabulary"):
        model.generate(ids + 1000, max_new_tokens=3)
    xlnet = transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=1, n_head=2, d_inner=32)
    with pytest.raises(UnsupportedModelError):
        AutoModelForTPU.from_config(xlnet, backend="torch_xla").generate([[3, 4]], max_new_tokens=2)
    git = AutoModelForTPU.from_config(hfax.shrink_config(transformers.GitConfig()), backend="torch_xla")
    size = git.config.vision_config.image_size
    with pytest.raises(UnsupportedModelError, match="does not take pixel_values"):
        git.generate(ids % 50, pixel_values=torch.zeros(1, 3, size, size), max_new_tokens=2)
    # and the next call works
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 11)


def test_a_device_that_does_not_come_up(tmp_path: Path) -> None:
    code = "from hfax.backends.torch_xla import runtime; runtime.device()"
    settings = {**os.environ, "PJRT_DEVICE": "NONSENSE"}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "found no device (PJRT_DEVICE=NONSENSE)" in done.stderr


SAME = """
import json, sys
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1], backend=sys.argv[2], dtype="float32")
ids = model.generate([[5, 6, 7, 8], [9, 10, 11, 12]], max_new_tokens=20, do_sample=False)
print(json.dumps([[int(token) for token in row] for row in ids]))
"""


def test_one_script_two_backends(llama: tuple) -> None:
    """With only backend= changed; the other environment is the one that `make test` made before."""
    other = Path(os.environ.get("HFAX_JAX_PYTHON", Path(__file__).parents[2] / ".venv" / "bin" / "python"))
    folder, found = llama[2], []
    for python, backend in ((Path(sys.executable), "torch_xla"), (other, "jax")):
        settings = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [python, "-c", SAME, str(folder), backend], env=settings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]


def test_far_faster_than_transformers_own_generate(tmp_path: Path) -> None:
    """Whose loop compiles about twice a token as soon as an end-of-sequence id is set."""
    config = tiny_models.tiny_llama_config(**{**SIZES, "num_hidden_layers": 1})
    reference = save(config, tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="torch_xla")
    ids = prompts()["input_ids"][1:]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 127}
    begin = time.perf_counter()
    mine = model.generate(ids, **options)
    own_s = time.perf_counter() - begin
    device = runtime.device()
    moved = reference.to(device)
    begin = time.perf_counter()
    theirs = moved.generate(ids.to(device), attention_mask=torch.ones_like(ids).to(device), **options).cpu()
    their_s = time.perf_counter() - begin
    assert mine.tolist() == theirs.tolist()
    print(f"own {own_s:.2f} s, transformers' {their_s:.2f} s")
    assert their_s > 5 * own_s


def test_patches_of_others(llama: tuple) -> None:
    """A patch for this backend is in force here, and named."""
    from hfax.patches.patch import FunctionPatch

    model, _, _ = llama
    patch = FunctionPatch(
        name="a-test",
        why="to see that it runs",
        target="transformers.models.llama.modeling_llama:apply_rotary_pos_emb",
        make=lambda original: original,
        backends=("torch_xla",),
    )
    undo = hfax.register_patch(patch)
    try:
        model(input_ids=prompts()["input_ids"])
        assert "a-test" in model.patches_used
    finally:
        undo()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("", "highest"),
        ("torch.set_float32_matmul_precision('high')", "high"),
        ("import torch_xla.backends; torch_xla.backends.set_mat_mul_precision('high')", "high"),
    ],
    ids=["nothing", "torch", "torch_xla"],
)
def test_float32_products_have_the_precision_of_torchs(told: str, expected: str) -> None:
    """XLA by itself would take bfloat16 on a TPU."""
    script = f"""
import torch
{told}
from hfax.backends.torch_xla import runtime
x = torch.ones(4, 4, device=runtime.device())
print(runtime.require()._XLAC._get_xla_tensors_hlo([x @ x]))
"""
    environment = os.environ | {"PYTHONPATH": str(Path(hfax.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert f"operand_precision={{{expected},{expected}}}" in done.stdout, done.stderr
    assert ("multiple times" in done.stderr) == ("torch_xla" in told)
