"""What a forward yields: the activations at the stages that both sides name alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptbridge.errors import UsageError


@dataclass(frozen=True, slots=True)
class Stages:
    """Activations in the order of computation, float64 or float32.

    Keys: ``embedding``; for each block ``layers.{i}.attention`` and ``layers.{i}.mlp`` (before they are
    added to the residual) and ``layers.{i}`` (the block's output); ``final_norm``; ``logits`` (the last
    hidden state when the model has no head); for BERT ``pooled``. ``feeds`` names the tensors that each
    stage reads since the one before it.
    """

    values: Mapping[str, NDArray[Any]]
    feeds: Mapping[str, tuple[str, ...]]

    @property
    def logits(self) -> NDArray[Any]:
        return self.values["logits"]


def check_tokens(tokens: NDArray[Any], vocab: int, longest: int = 0) -> NDArray[np.int64]:
    """``tokens`` as int64 (B, T), within the vocabulary and the model's length (0: unlimited).

    Raises UsageError that says which of these fails.
    """
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or tokens.size == 0:
        raise UsageError(
            f"Token ids must be a non-empty integer array (batch, length), not {tokens.dtype} {tokens.shape}."
        )
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise UsageError(
            f"A token id lies outside the model's vocabulary of {vocab} (found {tokens.min()} to {tokens.max()}).",
            remedy="Use the tokenizer that belongs to the model.",
        )
    if longest and tokens.shape[1] > longest:
        raise UsageError(
            f"The model has positions for {longest} tokens and was given {tokens.shape[1]}.",
            remedy=f"Give --length {longest} or less.",
        )
    return tokens.astype(np.int64)
