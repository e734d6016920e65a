"""What a model computes, as frozen data: the features of one configurable decoder and of the BERT encoder.

Nothing here knows how weights are named or stored (that is :mod:`.layouts`), nor any framework.
:mod:`.families` derives these specs from a ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: ``dim`` of a head's dimensions turn, with inverse frequencies by ``kind``.

    ``pairs``: neighbours (x0, x1), (x2, x3) ... form the planes that turn; otherwise dimension k and
    k + dim/2. ``scaling`` are the numbers of the config's ``rope_parameters`` (older configs:
    ``rope_scaling``) that the kind needs; ``factors`` are longrope's short and long lists.
    """

    dim: int
    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    pairs: bool = False
    max_positions: int = 0
    scaling: Mapping[str, float] = field(default_factory=dict)
    factors: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """``heads`` query heads of ``dim``, in ``groups`` groups that share a key and a value head."""

    heads: int
    groups: int
    dim: int
    bias: bool = False  # of q, k and v
    out_bias: bool = False
    norm: bool = False  # RMSNorm over each q and k head
    scale: float = 1.0  # of the scores, normally dim ** -0.5
    scale_by_layer: bool = False  # scores of layer i are divided by i + 1 besides
    alibi: bool = False

    @property
    def ratio(self) -> int:
        return self.heads // self.groups


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): keys and values rise from one narrow latent."""

    heads: int
    q_rank: int | None  # None: q is projected straight from the hidden state
    kv_rank: int
    nope: int  # dimensions of a q/k head without position
    rope: int  # dimensions of a q/k head that turn
    value: int
    scale: float
    bias: bool = False  # of the two down-projections and of the output
    eps: float = 1e-6  # of the norms on the latents; not the model's own epsilon


@dataclass(frozen=True, slots=True)
class FeedForward:
    """``gated``: down(act(gate(x)) * up(x)); otherwise down(act(up(x)))."""

    width: int
    act: str
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts and how its router chooses.

    Scores are ``scoring`` of the router's logits. With ``bias`` a stored number per expert is added
    for the choice alone. With ``groups`` > 1 only the best ``groups_kept`` groups of experts stay in
    the race, a group's score being its best expert's ("max") or the sum of its best two ("top2").
    """

    count: int
    chosen: int
    width: int
    act: str
    scoring: Literal["softmax", "sigmoid"]
    normalise: bool  # weights of the chosen divided by their sum
    scaling: float = 1.0
    bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    shared_width: int = 0  # 0: no shared expert
    shared_gate: bool = False  # shared expert's output times sigmoid of a stored projection


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only language model: embedding, blocks, final norm, head."""

    family: str
    vocab: int
    hidden: int
    layers: int
    norm: Literal["rms", "layer"]
    eps: float
    attention: GroupedAttention | LatentAttention
    feed_forward: FeedForward
    rope: Rope | None
    head: Literal["own", "tied", "none"]
    experts: Experts | None = None
    expert_layers: frozenset[int] = frozenset()
    windows: tuple[int | None, ...] = ()  # per layer: a query sees this many keys, itself included
    positions: int = 0  # rows of a learned position embedding
    parallel: bool = False  # attention and MLP read the same input and are added together
    sandwich: bool = False  # a norm after attention and after the MLP besides
    head_normalised: bool = False  # each row of the head is divided by its length first

    @property
    def longest(self) -> int:
        """Tokens that the model has positions for; 0: any number."""
        return self.positions


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """BERT and RoBERTa: post-norm encoder with learned positions and token types.

    ``padding`` is RoBERTa's padding token: such tokens stand at position ``padding``, the others count
    upwards from the one after it. None: BERT's plain positions from 0. ``head_act`` is the activation
    of the masked language model's head.
    """

    family: Literal["bert", "roberta"]
    vocab: int
    hidden: int
    layers: int
    heads: int
    width: int
    act: str
    eps: float
    positions: int
    types: int
    head: Literal["mlm", "none"]
    head_act: str
    pooler: bool
    padding: int | None = None

    @property
    def longest(self) -> int:
        """Tokens that the model has positions for."""
        return self.positions if self.padding is None else self.positions - self.padding - 1
