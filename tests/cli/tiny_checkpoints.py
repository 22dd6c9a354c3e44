"""Small random checkpoints with a real tokenizer, written by plain transformers."""

from __future__ import annotations

from pathlib import Path

TEXT = """Return a new list that holds the same items. Raise an error if the file is not found.
The quick brown fox jumps over the lazy dog. What a lovely day! What a terrible day! POSITIVE NEGATIVE
user assistant system Hello there, how are you today? Ünïcödé — naïve café 日本語 🙂"""

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('the user speaks first') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 256
LABELS = {0: "sad", 1: "glad", 2: "neither"}


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE):
    """A byte-level BPE tokenizer, trained on the spot; its end-of-sequence token is <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_end|>", "<|im_start|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = chat_template
    return fast


def save_language_model(folder: Path, chat_template: str | None = CHAT_TEMPLATE, context: int = CONTEXT) -> Path:
    """A Llama of two layers with random weights, the same every time."""
    from tiny_models import save, tiny_llama

    tokenizer = make_tokenizer(chat_template)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 2}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
    model = tiny_llama(max_position_embeddings=context, initializer_range=0.02, **sizes, **ends)
    return save(folder, model, tokenizer)


def save_classifier(folder: Path, problem_type: str | None = None) -> Path:
    """A DistilBERT with a head of three labels, and random weights."""
    from tiny_models import random_model, save
    from transformers import AutoModelForSequenceClassification, DistilBertConfig

    tokenizer = make_tokenizer(chat_template=None)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
        id2label=LABELS,
        label2id={v: k for k, v in LABELS.items()},
        pad_token_id=2,
        problem_type=problem_type,
        initializer_range=0.5,
    )
    return save(folder, random_model(config, auto=AutoModelForSequenceClassification), tokenizer)
