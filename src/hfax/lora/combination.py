"""Weighted combinations of low-rank pairs, with the names and formulas of PEFT's `add_weighted_adapter`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hfax.errors import InvalidInputError, UnsupportedOptionError

Pair = tuple[np.ndarray, np.ndarray]
"""`lora_A` [rank, in] and `lora_B` [out, rank], float32."""
_OF_PAIRS = ("linear", "ties", "magnitude_prune")
_OF_UPDATES = ("svd", "ties_svd", "magnitude_prune_svd")
COMBINATIONS = ("cat", *_OF_PAIRS, *_OF_UPDATES)
_SIGNS = ("total", "frequency")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combination:
    """How adapters are combined.

    Args:
        combination_type: "cat": the weighted sum of the updates, exactly, with the sum of the ranks. "svd": the nearest to that sum
            of rank `svd_rank`. "linear": sums of the matrices themselves, which is no sum of updates. "magnitude_prune" and "ties"
            (https://arxiv.org/abs/2306.01708): the same with small numbers left out, and with "ties" those of the minority's sign.
            "magnitude_prune_svd" and "ties_svd": of the updates, to a rank.
        weights: of each adapter.
        svd_rank: rank of the kinds with "svd"; None: the largest of the adapters.
        density: share of the numbers that pruning keeps.
        majority_sign_method: how "ties" elects a sign: "total", by the sum, or "frequency", by their number.

    Raises:
        InvalidInputError: an unknown name, a value out of range, or one that the kind does not use.
        UnsupportedOptionError: a kind that prunes at random.
    """

    combination_type: str
    weights: tuple[float, ...]
    svd_rank: int | None = None
    density: float | None = None
    majority_sign_method: str = "total"

    def __post_init__(self) -> None:
        kind = self.combination_type
        if kind.startswith("dare"):
            raise UnsupportedOptionError(
                f"combination_type={kind!r} is not supported.",
                "It leaves out numbers at random, so that no two results are the same.",
                f"Use {kind.replace('dare_', '').replace('linear', 'magnitude_prune')!r}.",
            )
        for name, known in (("combination_type", COMBINATIONS), ("majority_sign_method", _SIGNS)):
            if getattr(self, name) not in known:
                raise InvalidInputError(
                    f"{name}={getattr(self, name)!r} is unknown.", "It has PEFT's names.", f"Use {', '.join(known)}."
                )
        is_pruning = kind.startswith(("ties", "magnitude_prune"))
        is_share = self.density is None or 0 < self.density <= 1
        if is_pruning != (self.density is not None) or not is_share:
            raise InvalidInputError(
                f"density={self.density} does not go with combination_type={kind!r}.",
                "It is the share of the numbers that pruning keeps, above 0 and at most 1.",
                "Pass one, such as 0.5." if is_pruning else "Leave it out.",
            )
        if self.svd_rank is not None and (not kind.endswith("svd") or self.svd_rank < 1):
            raise InvalidInputError(
                f"svd_rank={self.svd_rank} does not go with combination_type={kind!r}.",
                "It is the rank, at least 1, that the kinds with svd keep.",
                "Leave it out.",
            )

    @property
    def is_of_pairs(self) -> bool:
        """Whether matrices of the adapters are added up, which must have equal ranks."""
        return self.combination_type in _OF_PAIRS

    def rank(self, ranks: Sequence[int]) -> int:
        """Rank of the result, from those of the adapters.

        Raises:
            InvalidInputError: they must be equal, and are not.
        """
        if self.combination_type == "cat":
            return sum(ranks)
        if self.is_of_pairs and len(set(ranks)) > 1:
            raise InvalidInputError(
                f"The adapters have the ranks {', '.join(map(str, ranks))}.",
                f"combination_type={self.combination_type!r} adds up their matrices.",
                "Use cat or svd.",
            )
        return self.svd_rank or max(ranks)

    def combined(self, pairs: Sequence[Pair | None], scalings: Sequence[float], rank: int) -> Pair:
        """One layer's pair, with a scaling of 1.

        Args:
            pairs: of each adapter; None: it does not have this layer.
            scalings: of each adapter on this layer.
            rank: of the result; what is left of it is 0.
        """
        given = [each for each in zip(pairs, self.weights, scalings, strict=True) if each[0] is not None]
        downs, ups = ([pair[i] for pair, _, _ in given if pair is not None] for i in (0, 1))
        weights, scales = (np.array([each[i] for each in given], np.float32) for i in (1, 2))
        factors = weights * scales
        if self.combination_type == "cat":
            down = np.concatenate([factor * each for factor, each in zip(factors, downs, strict=True)], axis=0)
            up = np.concatenate(ups, axis=1)
        elif self.is_of_pairs:
            roots = np.sqrt(np.abs(factors))
            down = self._sum(downs, roots * np.where(factors >= 0, 1, -1))
            up = self._sum(ups, roots)
        else:
            updates = [scale * (b @ a) for a, b, scale in zip(downs, ups, scales, strict=True)]
            left, values, right = np.linalg.svd(self._sum(updates, weights), full_matrices=False)
            down, up = right[:rank], left[:, :rank] * values[:rank]
        missing = rank - down.shape[0]
        return (
            np.pad(down, ((0, missing), (0, 0))).astype(np.float32),
            np.pad(up, ((0, 0), (0, missing))).astype(np.float32),
        )

    def _sum(self, arrays: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
        """The weighted sum, pruned as the kind wants."""
        stack, factors = np.stack(arrays), weights.reshape(-1, 1, 1).astype(np.float32)
        if self.density is not None:
            stack = np.stack([_largest(array, self.density) for array in stack])
        if not self.combination_type.startswith("ties"):
            return (stack * factors).sum(axis=0)
        signs = np.sign(stack)
        elected = (stack if self.majority_sign_method == "total" else signs).sum(axis=0)
        agrees = signs == np.where(elected >= 0, 1, -1)
        return (stack * factors * agrees).sum(axis=0) / np.maximum(agrees.sum(axis=0), 1)


def _largest(array: np.ndarray, density: float) -> np.ndarray:
    """The share of the numbers that are largest by magnitude; 0 for the others."""
    count = int(density * array.size)
    kept = np.zeros(array.size, bool)
    kept[np.argsort(-np.abs(array).reshape(-1), kind="stable")[:count]] = True
    return np.where(kept.reshape(array.shape), array, 0)
