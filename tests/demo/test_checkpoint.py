"""The bundled checkpoint: small, complete, honest about its loss, and loadable by plain transformers."""

import json
import math
import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

EIGHT_MEGABYTES = 8_000_000


@pytest.fixture(scope="module")
def plain_model(demo_folder):
    return AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def record(demo_folder):
    return json.loads((demo_folder / "training.json").read_text())


def token_losses(model, token_ids: list[int]) -> list[float]:
    """Nats of each token but the first, by plain transformers."""
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()


def test_folder_is_complete_and_at_most_eight_megabytes(demo_folder):
    sizes = {path.name: path.stat().st_size for path in demo_folder.iterdir() if path.is_file()}
    assert sum(sizes.values()) <= EIGHT_MEGABYTES, sizes
    needed = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "README.md",
    }
    assert needed <= sizes.keys()


def test_weights_are_stored_in_bfloat16_and_the_tied_head_once(demo_folder):
    from safetensors import safe_open

    with safe_open(demo_folder / "model.safetensors", "pt") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert dtypes == {"BF16"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert AutoConfig.from_pretrained(demo_folder).dtype == torch.bfloat16


def test_plain_transformers_loads_every_weight(demo_folder, record):
    model, info = AutoModelForCausalLM.from_pretrained(demo_folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.num_parameters() == record["parameters"]


def test_no_file_names_a_folder_of_the_machine_it_was_made_on(demo_folder):
    for path in demo_folder.iterdir():
        if path.suffix in {".json", ".md", ".jinja"}:
            assert not re.search(r"/(root|home|tmp|Users|work)/", path.read_text()), path.name


def test_held_out_loss_of_the_sample_is_the_card_s(demo_folder, repository, plain_model, tokenizer, record):
    """The card's last row, recomputed: cross entropy by torch, one sample at a time."""
    from demo_tokenizer import encode

    sample = json.loads((repository / "tests" / "demo" / "held_out_sample.json").read_text())
    context = plain_model.config.max_position_embeddings
    losses = [loss for text in sample for loss in token_losses(plain_model, encode(tokenizer, text)[:context])]
    claimed = record["held_out"]["sample"]
    assert len(losses) == claimed["tokens"]
    assert np.mean(losses) == pytest.approx(claimed["nats_per_token"], abs=0.05)
    assert f"| {claimed['tokens']:,} | {claimed['nats_per_token']:.3f} |" in (demo_folder / "README.md").read_text()


def test_held_out_loss_is_far_below_chance(record):
    chance = math.log(record["recipe"]["vocab_size"])
    for name, loss in record["held_out"].items():
        assert loss["nats_per_token"] < 0.6 * chance, name


def test_training_took_at_most_twenty_minutes(record):
    assert record["total_seconds"] <= 20 * 60


def test_generation_stops_at_the_end_token_and_never_writes_a_role(demo_folder, tokenizer):
    config = GenerationConfig.from_pretrained(demo_folder)
    assert config.eos_token_id == tokenizer.eos_token_id
    roles = tokenizer.convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"])
    assert set(roles) <= set(config.suppress_tokens)
    assert config.do_sample
    assert 0 < config.max_new_tokens < AutoConfig.from_pretrained(demo_folder).max_position_embeddings


def test_greedy_reply_ends_by_itself(plain_model, tokenizer):
    """A greeting that training contains: the reply is one of the texts written for it, closed by the end token."""
    from demo_chats import SMALL_TALK

    question = [{"role": "user", "content": "Who are you?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    sequence = plain_model.generate(**prompt, do_sample=False, repetition_penalty=1.0, max_new_tokens=100)[0]
    new = sequence[prompt["input_ids"].shape[1] :].tolist()
    assert new[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(new, skip_special_tokens=True) in [reply for _, reply in SMALL_TALK]
