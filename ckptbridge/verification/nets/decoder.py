"""One decoder for every family: assembled from a spec and a layout, run with stages tapped on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mindspore import ops

from ckptbridge.verification.nets.attention import (
    AttentionBlock,
    FusedLatentDown,
    Grouped,
    Latent,
    LatentDown,
    positions,
)
from ckptbridge.verification.nets.layout import Layout
from ckptbridge.verification.nets.moe import MixtureOfExperts
from ckptbridge.verification.nets.norms import Norm, rms
from ckptbridge.verification.nets.ops import number
from ckptbridge.verification.nets.readers import (
    ContiguousQkv,
    ExpertsReader,
    FeedForwardReader,
    GroupedQkv,
    HalvesMlp,
    Linear,
    PlainMlp,
    QueryKeyValue,
    RowsMlp,
    SeparateExperts,
    SeparateMlp,
    SeparateQkv,
    StackedExperts,
    product,
)
from ckptbridge.verification.nets.spec import DecoderSpec, Experts, GroupedAttention, LatentAttention
from ckptbridge.verification.nets.weights import Shapes, Tensor, Weights

Tap = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class Block:
    input_norm: Norm
    attention: AttentionBlock
    attention_post_norm: Norm | None
    mlp_norm: Norm
    mlp: FeedForwardReader
    mlp_post_norm: Norm | None
    window: int | None

    def shapes(self) -> Shapes:
        parts = (
            self.input_norm,
            self.attention,
            self.attention_post_norm,
            self.mlp_norm,
            self.mlp,
            self.mlp_post_norm,
        )
        return {name: shape for part in parts if part is not None for name, shape in part.shapes().items()}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder that reads one layout; the weights are given to each run."""

    spec: DecoderSpec
    embedding: str
    positions: str
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: Linear | None  # None: there is no head, or it is the embedding
    halved_heads: bool

    def shapes(self) -> Shapes:
        """Every parameter that the forward reads, with the shape that the config asks for."""
        spec = self.spec
        shapes: Shapes = {self.embedding: (spec.vocab, spec.hidden)}
        if self.positions:
            shapes[self.positions] = (spec.positions, spec.hidden)
        for block in self.blocks:
            shapes.update(block.shapes())
        shapes.update(self.final_norm.shapes())
        if self.head is not None:
            shapes.update(self.head.shapes())
        return shapes

    def run(self, weights: Weights, tokens: Tensor, tap: Tap) -> None:
        """The forward of ``tokens`` (B, T); each stage goes to ``tap``, the last one as ``logits``."""
        spec = self.spec
        length = tokens.shape[1]
        x = weights.rows(self.embedding, tokens)
        if self.positions:
            x = x + weights.rows(self.positions, ops.arange(length))
        tap("embedding", x)
        at = {
            window: positions(spec.rope, spec.attention, self.halved_heads, window, length, weights)
            for window in {block.window for block in self.blocks}
        }
        for i, block in enumerate(self.blocks):
            attended = block.attention(weights, block.input_norm(weights, x), at[block.window])
            tap(f"layers.{i}.attention", attended)
            if block.attention_post_norm is not None:
                attended = block.attention_post_norm(weights, attended)
            between = x if spec.parallel else x + attended
            fed = block.mlp(weights, block.mlp_norm(weights, between))
            tap(f"layers.{i}.mlp", fed)
            if block.mlp_post_norm is not None:
                fed = block.mlp_post_norm(weights, fed)
            x = between + fed + attended if spec.parallel else between + fed
            tap(f"layers.{i}", x)
        x = self.final_norm(weights, x)
        tap("final_norm", x)
        tap("logits", x if spec.head == "none" else self._logits(weights, x))

    def _logits(self, weights: Weights, x: Tensor) -> Tensor:
        if self.head is None:
            return product(x, weights(self.embedding), True)
        if self.spec.head_normalised:
            rows = weights(f"{self.head.name}.weight")
            length = ops.sqrt(ops.sum(rows * rows, -1, keepdim=True))
            return product(x, rows / ops.maximum(length, number(1e-12, length)), True)
        return self.head(weights, x)


def decoder(spec: DecoderSpec, layout: Layout, own_head: bool) -> Decoder:
    """Assemble the decoder of ``spec`` that reads ``layout``.

    ``own_head``: the checkpoint of a tied model holds the head all the same, so it is read (whether the
    two are equal is the weights level's question).
    """
    head = None
    if spec.head == "own" or (spec.head == "tied" and own_head):
        head = Linear(layout.head, spec.hidden, spec.vocab)
    return Decoder(
        spec=spec,
        embedding=layout.embedding,
        positions=layout.positions if spec.positions else "",
        blocks=tuple(_block(spec, layout, i) for i in range(spec.layers)),
        final_norm=_norm(spec, layout, layout.final_norm),
        head=head,
        halved_heads=layout.halved_heads,
    )


def _block(spec: DecoderSpec, layout: Layout, i: int) -> Block:
    at = layout.layer.replace("{i}", str(i))

    def normed(name: str) -> Norm:
        return _norm(spec, layout, at + name)

    mlp: FeedForwardReader
    if spec.experts is not None and i in spec.expert_layers:
        mlp = _experts(spec.experts, spec, layout, at)
    else:
        mlp = _mlp(spec, layout, at + layout.mlp, spec.feed_forward.width)
    return Block(
        input_norm=normed(layout.input_norm),
        attention=_attention(spec, layout, at, i),
        attention_post_norm=normed(layout.attention_post_norm) if spec.sandwich else None,
        mlp_norm=normed(layout.mlp_norm),
        mlp=mlp,
        mlp_post_norm=normed(layout.mlp_post_norm) if spec.sandwich else None,
        window=spec.windows[i] if spec.windows else None,
    )


def _norm(spec: DecoderSpec, layout: Layout, name: str) -> Norm:
    weight, bias = (f"{name}.{part}" for part in layout.norm_parts)
    return Norm(weight, bias if spec.norm == "layer" else "", spec.hidden, spec.eps)


def _attention(spec: DecoderSpec, layout: Layout, at: str, i: int) -> AttentionBlock:
    if isinstance(spec.attention, LatentAttention):
        return _latent(spec.attention, spec.hidden, layout, at)
    a = spec.attention
    norms = None
    if a.norm:
        norms = (rms(at + layout.q_norm, a.dim, spec.eps), rms(at + layout.k_norm, a.dim, spec.eps))
    return Grouped(
        qkv=_qkv(a, spec.hidden, layout, at),
        out=Linear(at + layout.out, a.heads * a.dim, spec.hidden, a.out_bias, "out" in layout.transposed),
        norms=norms,
        scale=a.scale / (i + 1) if a.scale_by_layer else a.scale,
    )


def _qkv(a: GroupedAttention, hidden: int, layout: Layout, at: str) -> QueryKeyValue:
    wide, narrow = a.heads * a.dim, a.groups * a.dim
    if layout.qkv_order == "separate":
        q, k, v = layout.qkv
        return SeparateQkv(
            Linear(at + q, hidden, wide, a.bias),
            Linear(at + k, hidden, narrow, a.bias),
            Linear(at + v, hidden, narrow, a.bias),
            a.dim,
        )
    linear = Linear(at + layout.qkv[0], hidden, wide + 2 * narrow, a.bias, "qkv" in layout.transposed)
    if layout.qkv_order == "contiguous":
        return ContiguousQkv(linear, a.heads, a.groups, a.dim)
    return GroupedQkv(linear, a.groups, a.ratio, a.dim)


def _latent(a: LatentAttention, hidden: int, layout: Layout, at: str) -> Latent:
    q_width, kv_width = a.heads * (a.nope + a.rope), a.kv_rank + a.rope
    first = q_width if a.q_rank is None else a.q_rank
    down: LatentDown | FusedLatentDown
    if layout.latent_order == "fused":
        down = FusedLatentDown(Linear(at + layout.latent_down, hidden, first + kv_width, a.bias), first)
    else:
        q_name = layout.q_direct if a.q_rank is None else layout.q_down
        down = LatentDown(
            Linear(at + q_name, hidden, first, a.bias and a.q_rank is not None),
            Linear(at + layout.kv_down, hidden, kv_width, a.bias),
        )
    return Latent(
        spec=a,
        down=down,
        q_norm=None if a.q_rank is None else rms(at + layout.q_down_norm, a.q_rank, a.eps),
        q_up=None if a.q_rank is None else Linear(at + layout.q_up, a.q_rank, q_width),
        kv_norm=rms(at + layout.kv_down_norm, a.kv_rank, a.eps),
        kv_up=Linear(at + layout.kv_up, a.kv_rank, a.heads * (a.nope + a.value)),
        out=Linear(at + layout.out, a.heads * a.value, hidden, a.bias),
    )


def _mlp(spec: DecoderSpec, layout: Layout, prefix: str, width: int) -> FeedForwardReader:
    f = spec.feed_forward
    transposed = "mlp" in layout.transposed
    down = Linear(prefix + layout.down, width, spec.hidden, f.bias, transposed)
    first = prefix + layout.gate_up[0]
    if not f.gated:
        return PlainMlp(Linear(first, spec.hidden, width, f.bias, transposed), down, f.act)
    if layout.gate_up_order == "separate":
        return _separate_mlp(prefix, (*layout.gate_up, layout.down), spec.hidden, width, f.act, f.bias)
    both = Linear(first, spec.hidden, 2 * width, f.bias)
    return HalvesMlp(both, down, f.act) if layout.gate_up_order == "halves" else RowsMlp(both, down, f.act)


def _separate_mlp(prefix: str, parts: tuple[str, ...], hidden: int, width: int, act: str, bias: bool) -> SeparateMlp:
    gate, up, down = (prefix + part for part in parts)
    return SeparateMlp(
        Linear(gate, hidden, width, bias), Linear(up, hidden, width, bias), Linear(down, width, hidden, bias), act
    )


def _experts(e: Experts, spec: DecoderSpec, layout: Layout, at: str) -> MixtureOfExperts:
    experts: ExpertsReader
    if layout.experts_order == "separate":
        prefixes = (at + layout.expert.replace("{e}", str(k)) for k in range(e.count))
        experts = SeparateExperts(
            tuple(_separate_mlp(p, layout.expert_parts, spec.hidden, e.width, e.act, False) for p in prefixes)
        )
    else:
        rank = 2 if layout.experts_order == "2d" else 3
        experts = StackedExperts(at + layout.experts, e.count, spec.hidden, e.width, e.act, rank)
    shared = None
    if e.shared_width:
        shared = _mlp(spec, layout, at + layout.shared, e.shared_width)
    return MixtureOfExperts(
        spec=e,
        router=Linear(at + layout.router, spec.hidden, e.count),
        bias=at + layout.router_bias if e.bias else "",
        experts=experts,
        shared=shared,
        shared_gate=Linear(at + layout.shared_gate, spec.hidden, 1) if e.shared_gate else None,
    )
