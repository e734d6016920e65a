"""BERT's and RoBERTa's encoder, reading PyTorch's names (``hf``, ``flat``) or mindspore.nn's (``nn``)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import ops

from ckptbridge.errors import UsageError
from ckptbridge.verification.nets.norms import Norm
from ckptbridge.verification.nets.ops import activation, attend
from ckptbridge.verification.nets.readers import Linear, PlainMlp, SeparateQkv, product
from ckptbridge.verification.nets.spec import EncoderSpec
from ckptbridge.verification.nets.weights import Shapes, Tensor, Weights


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    qkv: SeparateQkv
    out: Linear
    attention_norm: Norm
    mlp: PlainMlp
    mlp_norm: Norm

    def shapes(self) -> Shapes:
        parts = (self.qkv, self.out, self.attention_norm, self.mlp, self.mlp_norm)
        return {name: shape for part in parts for name, shape in part.shapes().items()}


@dataclass(frozen=True, slots=True)
class MaskedLmHead:
    dense: Linear
    norm: Norm
    decoder: str  # the word embedding's name when tied
    bias: str

    def shapes(self, spec: EncoderSpec) -> Shapes:
        table = {self.decoder: (spec.vocab, spec.hidden), self.bias: (spec.vocab,)}
        return {**self.dense.shapes(), **self.norm.shapes(), **table}


@dataclass(frozen=True, slots=True)
class Encoder:
    spec: EncoderSpec
    tables: tuple[str, str, str]  # word, position and token type embeddings
    norm: Norm
    blocks: tuple[EncoderBlock, ...]
    pooler: Linear | None
    head: MaskedLmHead | None

    def shapes(self) -> Shapes:
        """Every parameter that the forward reads, with the shape that the config asks for."""
        spec = self.spec
        rows = (spec.vocab, spec.positions, spec.types)
        shapes: Shapes = {name: (count, spec.hidden) for name, count in zip(self.tables, rows, strict=True)}
        shapes.update(self.norm.shapes())
        for block in self.blocks:
            shapes.update(block.shapes())
        if self.pooler is not None:
            shapes.update(self.pooler.shapes())
        if self.head is not None:
            shapes.update(self.head.shapes(spec))
        return shapes

    def run(self, weights: Weights, tokens: Tensor, tap: Callable[[str, Tensor], None]) -> None:
        """The forward of ``tokens`` (B, T), all of one type and none masked.

        Without a language-model head ``logits`` is the last hidden state, and ``pooled`` follows.
        """
        spec = self.spec
        words, places, kinds = self.tables
        x = weights.rows(words, tokens) + weights.rows(places, _positions(spec, tokens))
        x = self.norm(weights, x + weights.rows(kinds, ms.Tensor([0], ms.int32)))
        tap("embedding", x)
        scale = (spec.hidden // spec.heads) ** -0.5
        nothing = ops.zeros((1,), weights.wide)
        for i, block in enumerate(self.blocks):
            q, k, v = block.qkv(weights, x)
            attended = block.out(weights, attend(q, k, v, scale, nothing, weights.wide))
            tap(f"layers.{i}.attention", attended)
            x = block.attention_norm(weights, x + attended)
            fed = block.mlp(weights, x)
            tap(f"layers.{i}.mlp", fed)
            x = block.mlp_norm(weights, x + fed)
            tap(f"layers.{i}", x)
        if self.head is None:
            tap("logits", x)
        else:
            h = self.head.norm(weights, activation(spec.head_act)(self.head.dense(weights, x)))
            tap("logits", product(h, weights(self.head.decoder), True) + weights(self.head.bias))
        if self.pooler is not None:
            tap("pooled", ops.tanh(self.pooler(weights, x[:, 0])))


def _positions(spec: EncoderSpec, tokens: Tensor) -> Tensor:
    """(T,), or for RoBERTa (B, T): a token's position follows from the padding before it."""
    if spec.padding is None:
        return ops.arange(tokens.shape[1])
    real = tokens.asnumpy() != spec.padding
    return ms.Tensor(np.cumsum(real, 1) * real + spec.padding, ms.int32)


def encoder(spec: EncoderSpec, target: str, names: Collection[str]) -> Encoder:
    """The encoder that reads a checkpoint for ``target`` (hf, flat or nn) holding ``names``.

    The names decide the root (``bert.``, ``roberta.`` or none), whether a pooler is there, and whether the head has a
    decoder of its own. Raises UsageError for another target.
    """
    if target not in ("hf", "flat", "nn"):
        raise UsageError(
            f"There is no built-in MindSpore network for a {spec.family} checkpoint in the layout '{target}'.",
            remedy="Give --level weights, or a network of your own with --ms-net MODULE:FUNCTION; "
            "built in are: hf, flat, nn.",
        )
    table, gamma, beta = ("embedding_table", "gamma", "beta") if target == "nn" else ("weight", "weight", "bias")
    word = f"embeddings.word_embeddings.{table}"
    root = "" if word in names else f"{spec.family}."

    def normed(name: str) -> Norm:
        return Norm(f"{name}.{gamma}", f"{name}.{beta}", spec.hidden, spec.eps)

    def block(i: int) -> EncoderBlock:
        at, hidden = f"{root}encoder.layer.{i}.", spec.hidden
        q, k, v = (Linear(f"{at}attention.self.{part}", hidden, hidden, True) for part in ("query", "key", "value"))
        return EncoderBlock(
            qkv=SeparateQkv(q, k, v, hidden // spec.heads),
            out=Linear(f"{at}attention.output.dense", hidden, hidden, True),
            attention_norm=normed(f"{at}attention.output.LayerNorm"),
            mlp=PlainMlp(
                Linear(f"{at}intermediate.dense", hidden, spec.width, True),
                Linear(f"{at}output.dense", spec.width, hidden, True),
                spec.act,
            ),
            mlp_norm=normed(f"{at}output.LayerNorm"),
        )

    head = None
    if spec.head == "mlm":
        top, dense, after = ("cls.predictions.", "transform.dense", "transform.LayerNorm")
        if spec.family == "roberta":
            top, dense, after = ("lm_head.", "dense", "layer_norm")
        own = f"{top}decoder.weight"
        head = MaskedLmHead(
            dense=Linear(top + dense, spec.hidden, spec.hidden, True),
            norm=normed(top + after),
            decoder=own if own in names else root + word,
            bias=f"{top}bias",
        )
    pooled = spec.pooler and f"{root}pooler.dense.weight" in names
    return Encoder(
        spec=spec,
        tables=(
            root + word,
            f"{root}embeddings.position_embeddings.{table}",
            f"{root}embeddings.token_type_embeddings.{table}",
        ),
        norm=normed(f"{root}embeddings.LayerNorm"),
        blocks=tuple(block(i) for i in range(spec.layers)),
        pooler=Linear(f"{root}pooler.dense", spec.hidden, spec.hidden, True) if pooled else None,
        head=head,
    )
