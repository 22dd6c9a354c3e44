"""Embeddings from encoder models.

Pools the last hidden state as the checkpoint says (sentence-transformers' 1_Pooling/config.json), mean pooling by default, and
normalizes the vectors to unit length.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from hfax.errors import EngineBusyError, InvalidInputError
from hfax.programs.buckets import prompt_bucket

_BATCH = 32
_KINDS = {"pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


class Embedder:
    """Computes embeddings.

    Args:
        model: an `AutoModelForTPU` model, loaded for "feature-extraction".
        tokenizer: a transformers tokenizer.
        folder: the checkpoint's folder.
    """

    def __init__(self, model: Any, tokenizer: Any, folder: Path | None) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._pooling = _read_pooling(folder)
        self.max_tokens: int | None = model.config_value("max_position_embeddings")
        self._pad_id = model.config_value("pad_token_id") or 0
        reserved = model.config_value("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet")
        if self.max_tokens is not None and reserved:
            self.max_tokens -= 2  # their position ids start after the padding index

    def check(self, texts: list[list[int]]) -> None:
        """Raise `InvalidInputError` if an input, given as token ids, has too many tokens."""
        for ids in texts:
            if self.max_tokens is not None and len(ids) > self.max_tokens:
                raise InvalidInputError(
                    f"An input has {len(ids)} tokens; the model's limit is {self.max_tokens}.",
                    "The model has no position embeddings beyond that.",
                    "Shorten the input.",
                )

    def batches(self, texts: list[list[int]]) -> list[list[int]]:
        """Split inputs into batches of similar lengths; returns the inputs' indices."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        return [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]

    def warm_up(self) -> None:
        """Compile the program for one short input."""
        self.embed_batch([[self._pad_id + 1]])

    def embed_batch(self, texts: list[list[int]]) -> np.ndarray:
        """Compute one embedding per input, [inputs, width] float32.

        Args:
            texts: the token ids of each input, at most 32 of them.

        Raises:
            InvalidInputError: an input has ids outside the vocabulary.
        """
        longest = prompt_bucket(max(len(ids) for ids in texts), self.max_tokens)
        rows = 1 if len(texts) == 1 else _BATCH
        ids = np.full((rows, longest), self._pad_id, np.int32)
        mask = np.zeros((rows, longest), np.int32)
        mask[len(texts) :, 0] = 1
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        hidden = np.asarray(self._model.output("last_hidden_state", input_ids=ids, attention_mask=mask), np.float32)
        vectors = self._pool(hidden, mask)[: len(texts)]
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def _pool(self, hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
        if self._pooling == "first":
            return hidden[:, 0]
        if self._pooling == "last":
            return hidden[np.arange(len(hidden)), mask.sum(axis=1) - 1]
        return (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)


class EmbeddingQueue:
    """Runs embedding requests one by one, for one event loop.

    A request whose client disconnects is cancelled at its next batch.

    Args:
        max_waiting: maximum number of waiting requests.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._turn = asyncio.Lock()

    async def compute(self, embedder: Embedder, texts: list[list[int]]) -> np.ndarray:
        """Compute one embedding per input, [inputs, width] float32.

        Raises:
            InvalidInputError: an input has too many tokens, or ids outside the vocabulary.
            EngineBusyError: too many requests wait.
        """
        embedder.check(texts)
        if self._num_waiting >= self._max_waiting:
            raise EngineBusyError(
                f"{self._num_waiting} embedding requests are waiting.",
                f"The limit is {self._max_waiting}.",
                "Retry later.",
            )
        found: dict[int, np.ndarray] = {}
        for rows in embedder.batches(texts):
            self._num_waiting += 1
            try:
                await self._turn.acquire()  # requests take turns, batch by batch
            finally:
                self._num_waiting -= 1
            running = asyncio.ensure_future(asyncio.to_thread(embedder.embed_batch, [texts[i] for i in rows]))
            running.add_done_callback(lambda _: self._turn.release())  # a thread goes on when its request is cancelled
            found |= dict(zip(rows, await asyncio.shield(running), strict=True))
        return np.stack([found[i] for i in range(len(texts))])


_MODULES = ("Transformer", "Pooling", "Normalize")
"""The classes of sentence-transformers whose work is done here."""


def _pooling_file(folder: Path) -> Path | None:
    """The configuration of the pooling, by sentence-transformers' list of modules; None if the checkpoint has none.

    Raises:
        InvalidInputError: a module of another kind follows, or the file is missing.
    """
    listed = folder / "modules.json"
    if not listed.is_file():
        return file if (file := folder / "1_Pooling" / "config.json").is_file() else None
    modules = {module["type"].rpartition(".")[2]: module for module in json.loads(listed.read_text(encoding="utf-8"))}
    if unknown := [kind for kind in modules if kind not in _MODULES]:
        raise InvalidInputError(
            f"{listed} has modules that the server does not compute: {', '.join(unknown)}.",
            "Without them the embeddings would be others than sentence-transformers'.",
            "Use a model of Transformer, Pooling and Normalize alone, or serve it with sentence-transformers.",
        )
    if "Pooling" not in modules:
        return None
    if not (file := folder / modules["Pooling"]["path"] / "config.json").is_file():
        raise InvalidInputError(
            f"{file} is missing.",
            f"{listed} names it, and embeddings depend on it.",
            "Download or copy the checkpoint with its subfolders.",
        )
    return file


def _read_pooling(folder: Path | None) -> str:
    file = None if folder is None else _pooling_file(folder)
    if file is None:
        return "mean"
    found = [kind for key, kind in _KINDS.items() if json.loads(file.read_text()).get(key)]
    if len(found) != 1:
        raise InvalidInputError(
            f"{file} sets an unsupported pooling mode.",
            "The server supports CLS, mean and last-token pooling.",
            "Use a model with one of these pooling modes.",
        )
    return found[0]
