"""How tensors of unknown layers are told apart: what is plain, what is asked, and what is shown to paste."""

from __future__ import annotations

import shlex

import pytest

from ckptbridge.errors import CoverageError, ProofError, UsageError
from ckptbridge.tables.generic import TABLE, expand_generic
from ckptbridge.tables.generic_options import OPTIONS
from ckptbridge.tables.proof import prove

Shapes = dict[str, tuple[int, ...]]


def pairs(side: str, shapes: Shapes, **options: str) -> dict[str, str]:
    """What each tensor is called on the other side; dropped ones are left out."""
    expansion = expand_generic(side, shapes, options)  # type: ignore[arg-type]
    prove(expansion)
    found = {}
    for entry in expansion.entries:
        if entry.kind == "map":
            a, b = (entry.pt, entry.ms) if side == "pt" else (entry.ms, entry.pt)
            found[a[0]] = b[0]
    return found


def asked(side: str, shapes: Shapes, **options: str) -> str:
    with pytest.raises(CoverageError) as caught:
        expand_generic(side, shapes, options)  # type: ignore[arg-type]
    return caught.value.remedy


NORM = {"n.weight": (4,), "n.bias": (4,)}
STATISTICS = {"n.running_mean": (4,), "n.running_var": (4,), "n.num_batches_tracked": ()}


# --- what names and shapes tell --------------------------------------------------------------


def test_batch_norm_is_known_by_its_statistics() -> None:
    """B1, B12."""
    expansion = expand_generic("pt", NORM | STATISTICS)
    assert {e.pt[0]: e.ms[0] for e in expansion.entries if e.kind == "map"} == {
        "n.weight": "n.gamma",
        "n.bias": "n.beta",
        "n.running_mean": "n.moving_mean",
        "n.running_var": "n.moving_variance",
    }
    dropped = expansion.by_pt["n.num_batches_tracked"]
    assert dropped.kind == "drop"
    assert "torch starts at 0" in dropped.rule.drop


def test_a_norm_is_known_by_a_bias_of_its_weights_shape() -> None:
    assert pairs("pt", NORM) == {"n.weight": "n.gamma", "n.bias": "n.beta"}
    assert pairs("pt", {"n.weight": (4, 6), "n.bias": (4, 6)}) == {"n.weight": "n.gamma", "n.bias": "n.beta"}
    # A dense layer to one output, and the network itself being a norm.
    assert pairs("pt", {"d.weight": (1, 1), "d.bias": (1,)}) == {"d.weight": "d.weight", "d.bias": "d.bias"}
    assert pairs("pt", {"weight": (4,), "bias": (4,)}) == {"weight": "gamma", "bias": "beta"}


def test_a_norm_without_affine_parameters_has_statistics_only() -> None:
    shapes = {name: shape for name, shape in STATISTICS.items() if "tracked" not in name}
    assert pairs("pt", shapes) == {"n.running_mean": "n.moving_mean", "n.running_var": "n.moving_variance"}


def test_layer_scale_keeps_its_gamma() -> None:
    """B4: there and back, beside a module whose name holds the word."""
    shapes: Shapes = {"blocks.0.ls1.gamma": (8,), "gamma_net.weight": (8, 6), "gamma_net.bias": (8,)}
    there = pairs("pt", shapes)
    assert there == {name: name for name in shapes}
    assert pairs("ms", shapes) == there


def test_one_dimensional_kernels_gain_a_height_of_one() -> None:
    """B6, and back by what was recorded."""
    expansion = expand_generic("pt", {"c.weight": (5, 3, 4), "c.bias": (5,), "flat.weight": (5, 3, 1, 4)})
    assert expansion.by_pt["c.weight"].ms_shapes == ((5, 3, 1, 4),)
    assert expansion.by_pt["flat.weight"].ms_shapes == ((5, 3, 1, 4),)
    assert expansion.layout["conv1d"] == "c"
    back = expand_generic(
        "ms", {"c.weight": (5, 3, 1, 4), "c.bias": (5,), "flat.weight": (5, 3, 1, 4)}, expansion.layout
    )
    assert back.by_pt["c.weight"].pt_shapes == ((5, 3, 4),)
    assert back.by_pt["flat.weight"].pt_shapes == ((5, 3, 1, 4),)


def test_what_has_other_names_keeps_them() -> None:
    shapes: Shapes = {
        "rnn.weight_ih_l0": (12, 2),
        "rnn.bias_hh_l0": (12,),
        "att.in_proj_weight": (12, 4),
        "cls_token": (1, 1, 4),
        "logit_scale": (),
        "empty.table": (0, 4),
        "cell.bias": (3,),
    }
    assert pairs("pt", shapes) == pairs("ms", shapes) == {name: name for name in shapes}


def test_names_come_back_from_mindspore_alone_where_they_say_enough() -> None:
    shapes: Shapes = {
        "n.gamma": (4,),
        "n.beta": (4,),
        "n.moving_mean": (4,),
        "n.moving_variance": (4,),
        "ln.gamma": (4,),
        "ln.beta": (4,),
        "e.embedding_table": (7, 4),
        "d.weight": (3, 4),
        "c.weight": (5, 3, 3, 3),
    }
    assert pairs("ms", shapes) == {
        "n.gamma": "n.weight",
        "n.beta": "n.bias",
        "n.moving_mean": "n.running_mean",
        "n.moving_variance": "n.running_var",
        "ln.gamma": "ln.weight",
        "ln.beta": "ln.bias",
        "e.embedding_table": "e.weight",
        "d.weight": "d.weight",
        "c.weight": "c.weight",
    }


def test_a_kernel_of_three_dimensions_in_mindspore_is_no_layer_of_nn() -> None:
    """As in mindspore.mint or a network's own; it stays so when it goes the other way again."""
    expansion = expand_generic("ms", {"c.weight": (5, 3, 4)})
    assert expansion.by_ms["c.weight"].pt_shapes == ((5, 3, 4),)
    again = expand_generic("pt", {"c.weight": (5, 3, 4)}, expansion.layout)
    assert again.by_pt["c.weight"].ms_shapes == ((5, 3, 4),)


# --- what is asked ---------------------------------------------------------------------------


def test_matrices_without_a_bias_are_asked_for() -> None:
    shapes: Shapes = {
        "tok.weight": (9, 4),
        "pos[0].weight": (5, 4),
        "head.weight": (9, 4),
        "d.weight": (4, 4),
        "d.bias": (4,),
    }
    shown = asked("pt", shapes)
    assert "--layout 'embedding=tok,pos[[]0],head'\n--layout embedding=none" in shown
    settled = pairs("pt", shapes, embedding="tok,pos*")
    assert settled["tok.weight"] == "tok.embedding_table"
    assert settled["pos[0].weight"] == "pos[0].embedding_table"
    assert settled["head.weight"] == "head.weight"
    assert pairs("pt", shapes, embedding="none")["tok.weight"] == "tok.weight"
    # What is shown can be pasted as it is.
    line = next(x for x in shown.splitlines() if "embedding=tok" in x)
    option, value = shlex.split(line)
    assert option == "--layout"
    assert set(pairs("pt", shapes, embedding=value.removeprefix("embedding=")).values()) == {
        "tok.embedding_table",
        "pos[0].embedding_table",
        "head.embedding_table",
        "d.weight",
        "d.bias",
    }


def test_vectors_without_a_bias_are_asked_for_each() -> None:
    shapes: Shapes = {"a.weight": (4,), "b.weight": (4,), "c.weight": (1,)}
    shown = asked("pt", shapes)
    for option in ("norm", "prelu", "keep"):
        assert f"--layout {option}=a,b,c" in shown
    assert "a,b,c" not in asked("pt", shapes, norm="a", prelu="c")
    assert pairs("pt", shapes, norm="a", prelu="c", keep="b") == {
        "a.weight": "a.gamma",
        "b.weight": "b.weight",
        "c.weight": "c.w",
    }


def test_everything_in_doubt_is_shown_at_once() -> None:
    shown = asked("pt", {"t.weight": (9, 4), "p.weight": (4,), "v.weight_g": (4, 1), "v.weight_v": (4, 3)})
    assert "--layout embedding=t" in shown
    assert "--layout prelu=p" in shown
    assert "--layout keep=v" in shown
    assert "remove_weight_norm" in shown


def test_batch_norms_beside_three_dimensional_kernels_are_asked_for() -> None:
    shapes: Shapes = {"c.weight": (4, 3, 2, 2, 2), **NORM, **STATISTICS}
    assert "--layout batch_norm_3d=n\n--layout batch_norm_3d=none" in asked("pt", shapes)
    assert pairs("pt", shapes, batch_norm_3d="n")["n.running_var"] == "n.bn2d.moving_variance"
    assert pairs("pt", shapes, batch_norm_3d="none")["n.running_var"] == "n.moving_variance"


def test_mindspore_names_that_say_too_little_are_asked_for() -> None:
    assert "--layout conv1d=c\n--layout conv1d=none" in asked("ms", {"c.weight": (4, 3, 1, 5)})
    assert "--layout prelu=p" in asked("ms", {"p.w": (4,)})
    statistics: Shapes = {f"n.bn2d.{x}": (4,) for x in ("gamma", "beta", "moving_mean", "moving_variance")}
    assert "--layout batch_norm_3d=n\n" in asked("ms", statistics)
    assert pairs("ms", statistics, batch_norm_3d="n")["n.bn2d.gamma"] == "n.weight"
    assert pairs("ms", statistics, batch_norm_3d="none")["n.bn2d.gamma"] == "n.bn2d.weight"
    assert pairs("ms", {"p.w": (4,)}, prelu="p") == {"p.w": "p.weight"}
    assert pairs("ms", {"p.w": (4,)}, prelu="none") == {"p.w": "p.w"}
    assert pairs("ms", {"r.gamma": (4,)}, norm="r") == {"r.gamma": "r.weight"}


@pytest.mark.parametrize(
    ("side", "shapes"),
    [
        ("pt", {"n.gamma": (4,), "n.beta": (4,)}),  # TensorFlow's names in a PyTorch file
        ("pt", {"e.embedding_table": (9, 4)}),
        ("pt", {"n.moving_mean": (4,), "n.moving_variance": (4,)}),
        ("ms", {"n.weight": (4,), "n.bias": (4,)}),  # torch's names in a MindSpore file
        ("ms", {"n.running_mean": (4,)}),
    ],
)
def test_names_of_the_other_framework_are_kept_only_when_asked(side: str, shapes: Shapes) -> None:
    module = next(iter(shapes)).partition(".")[0]
    assert f"--layout keep={module}" in asked(side, shapes)
    assert pairs(side, shapes, keep=module) == {name: name for name in shapes}


def test_two_tensors_never_get_one_name() -> None:
    shapes: Shapes = {"n.weight": (4,), "n.bias": (4,), "n.gamma": (4,)}
    with pytest.raises((ProofError, CoverageError)):
        prove(expand_generic("pt", shapes))


# --- the options -----------------------------------------------------------------------------


def test_options_that_do_not_fit_are_refused() -> None:
    shapes: Shapes = {"tok.weight": (9, 4), "conv.weight": (4, 3, 2, 2), "d.weight": (4, 4), "d.bias": (4,)}
    with pytest.raises(UsageError, match="no layout option 'embeddings'") as caught:
        expand_generic("pt", shapes, {"embeddings": "tok"})
    assert "Did you mean 'embedding'?" in caught.value.remedy
    with pytest.raises(UsageError, match="No module of the checkpoint is called 'tokk'") as caught:
        expand_generic("pt", shapes, {"embedding": "tokk"})
    assert "Did you mean 'tok'?" in caught.value.remedy
    for wrong in ("conv", "d"):
        with pytest.raises(UsageError, match=f"'{wrong}' cannot be what --layout embedding says"):
            expand_generic("pt", shapes, {"embedding": f"tok,{wrong}"})
    # A glob may reach further than what is meant.
    assert pairs("pt", shapes, embedding="*")["conv.weight"] == "conv.weight"


def test_a_module_is_one_thing_only() -> None:
    with pytest.raises(UsageError, match="norm, prelu"):
        expand_generic("pt", {"a.weight": (4,)}, {"norm": "a", "prelu": "a"})


def test_what_was_settled_is_written_out() -> None:
    shapes: Shapes = {"tok.weight": (9, 4), "head.weight": (9, 4), "act.weight": (4,), "weight": (4,), **NORM}
    expansion = expand_generic("pt", shapes, {"embedding": "t*", "prelu": "act", "norm": "."})
    assert dict(expansion.layout) == {
        "embedding": "tok",
        "norm": ".",
        "prelu": "act",
        "conv1d": "none",
        "batch_norm_3d": "none",
        "keep": "none",
    }
    assert expansion.layout.keys() == OPTIONS.keys()


def test_the_table_is_one_for_all_networks() -> None:
    assert TABLE.name == "torch-nn/nn"
    assert len(TABLE.digest) == len("sha256:") + 64
    assert {str(entry.rule) for entry in expand_generic("pt", NORM).entries} <= {str(rule) for rule in TABLE.rules}


def test_a_hundred_thousand_tensors_are_read_in_seconds() -> None:
    shapes: Shapes = {}
    for k in range(25_000):
        shapes |= {f"b.{k}.w.weight": (4, 4), f"b.{k}.w.bias": (4,), f"b.{k}.n.weight": (4,), f"b.{k}.n.bias": (4,)}
    assert len(prove(expand_generic("pt", shapes)).free) == 0
