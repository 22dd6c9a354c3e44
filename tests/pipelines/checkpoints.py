"""Small checkpoints for every pipeline: random weights, real tokenizers and processors, written by plain transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_models import save, tiny_llama_config
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.models.llava.processing_llava import LlavaProcessor

_SENTENCE = (
    "the quick brown fox jumps over lazy dog who lives in a small red house near old mill and eats fish every day"
)
WORDS = _SENTENCE.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<image>"]
CHAT = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
IMAGE = 28
RATE = 16_000


def word_tokenizer(model_max_length: int = 128) -> Any:
    """One token a word, BERT's special tokens."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS, "?", ".", ","])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=model_max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def text_tokenizer() -> Any:
    """The same words without special tokens around them, and an image token, for models that write."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS, "?", ".", ","])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]", padding_side="left"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    fast.chat_template = CHAT
    return fast


def _written(folder: Path, model: Any, *parts: Any) -> Path:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5)
    return save(folder, model.eval(), *parts)


def _bert(head: str, **config: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        tokenizer = word_tokenizer()
        made = transformers.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=128,
            **config,
        )
        return _written(folder, getattr(transformers, head)(made), tokenizer)

    return save


def _llama(folder: Path) -> Path:
    tokenizer = text_tokenizer()
    return _written(folder, transformers.LlamaForCausalLM(_llama_config(tokenizer)), tokenizer)


def _llama_config(tokenizer: Any) -> Any:
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
    return tiny_llama_config(bos_token_id=None, eos_token_id=3, **sizes)


def _vit(folder: Path) -> Path:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=IMAGE,
        patch_size=7,
        id2label={0: "cat", 1: "dog", 2: "house"},
        label2id={"cat": 0, "dog": 1, "house": 2},
    )
    processor = transformers.ViTImageProcessorPil(size={"height": IMAGE, "width": IMAGE})
    return _written(folder, transformers.ViTForImageClassification(config), processor)


def _llava(folder: Path) -> Path:
    tokenizer = text_tokenizer()
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE,
        patch_size=14,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=_llama_config(tokenizer),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE}, crop_size={"height": IMAGE, "width": IMAGE}
    )
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )
    return _written(folder, transformers.LlavaForConditionalGeneration(config), processor)


def _wav2vec2(folder: Path) -> Path:
    (folder / "vocab.json").write_text('{"[PAD]": 0, "[UNK]": 1, "|": 2, "a": 3, "b": 4, "c": 5, "d": 6}')
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), pad_token="[PAD]", unk_token="[UNK]")
    config = transformers.Wav2Vec2Config(
        vocab_size=7,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_kernel=(10, 8, 8),
        conv_stride=(8, 8, 5),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    features = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE)
    return _written(folder, transformers.Wav2Vec2ForCTC(config), tokenizer, features)


LANGUAGES = ("en", "de", "fr")


def whisper_tokenizer() -> Any:
    """Whisper's special tokens behind an alphabet of bytes, timestamps last."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES)]
    special += [
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.WhisperTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|endoftext|>", bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": special[1:]})
    fast.add_tokens([f"<|{0.02 * i:.2f}|>" for i in range(61)])
    return fast


def save_whisper(folder: Path) -> Path:
    """A Whisper that hears a second at a time, with the generation config of a multilingual checkpoint."""
    tokenizer = whisper_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=64,
        pad_token_id=ids("<|endoftext|>"),
        bos_token_id=ids("<|endoftext|>"),
        eos_token_id=ids("<|endoftext|>"),
        decoder_start_token_id=ids("<|startoftranscript|>"),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    features = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, sampling_rate=RATE, n_fft=400)
    _written(folder, model, transformers.WhisperProcessor(features, tokenizer))
    options = {
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": ids(f"<|{name}|>") for name in LANGUAGES},
        "task_to_id": {"transcribe": ids("<|transcribe|>"), "translate": ids("<|translate|>")},
        "no_timestamps_token_id": ids("<|notimestamps|>"),
        "prev_sot_token_id": ids("<|startofprev|>"),
        "max_initial_timestamp_index": 20,
        "alignment_heads": [[0, 1], [1, 0], [1, 3]],
        "return_timestamps": False,
        "suppress_tokens": [1, 2, 7],
        "begin_suppress_tokens": [5, ids("<|endoftext|>")],
        "max_length": 40,
    }
    file = folder / "generation_config.json"
    values = json.loads(file.read_text()) | options
    file.write_text(json.dumps({n: v for n, v in values.items() if n != "_from_model_config"}))
    return folder


SAVE: dict[str, Callable[[Path], Path]] = {
    "text-generation": _llama,
    "text-classification": _bert("BertForSequenceClassification", num_labels=3),
    "token-classification": _bert("BertForTokenClassification", num_labels=4),
    "question-answering": _bert("BertForQuestionAnswering"),
    "fill-mask": _bert("BertForMaskedLM"),
    "feature-extraction": _bert("BertModel"),
    "zero-shot-classification": _bert(
        "BertForSequenceClassification",
        id2label={0: "contradiction", 1: "neutral", 2: "entailment"},
        label2id={"contradiction": 0, "neutral": 1, "entailment": 2},
    ),
    "image-classification": _vit,
    "image-text-to-text": _llava,
    "automatic-speech-recognition": save_whisper,
    "automatic-speech-recognition, ctc": _wav2vec2,
}


def picture(seed: int = 0) -> Any:
    """A picture of blocks, larger than the models take."""
    blocks = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(8, axis=0).repeat(8, axis=1))


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """[samples] float32: three tones that come and go."""
    time = np.arange(int(seconds * RATE)) / RATE
    tones = [
        np.sin(2 * np.pi * f * time) * np.sin(np.pi * time * (k + 1 + seed)) for k, f in enumerate((220, 700, 1900))
    ]
    return (0.2 * np.sum(tones, axis=0)).astype(np.float32)
