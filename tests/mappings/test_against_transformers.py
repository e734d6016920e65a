"""What transformers itself writes and reads: names, shapes, config defaults, and the way there and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_models import TINY, UNBUILT, Config, decoder_shapes, encoder_shapes, head_shapes, tiny_config
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from table_judge import FAMILIES, HEADS, layouts, translate, unfit

from ckptbridge.tables import catalog
from ckptbridge.tables.expand import choose_roots, expand

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BUILT = [(model_type, variant) for model_type, variant in TINY if variant not in UNBUILT]
DECODERS = [pair for pair in BUILT if pair[0] not in HEADS]


def _save(model: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """Save as published checkpoints are; the names and shapes from the file's header."""
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping


def _build(config: Config, auto: str = "AutoModelForCausalLM") -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(**config))
    # Norms start as ones, biases as zeros and buffers as both: with those a wrong place would not show.
    for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
        tensor.data.normal_()
    return model


@pytest.mark.parametrize(("model_type", "variant"), DECODERS)
def test_decoders_have_the_published_names(model_type: str, variant: str, tmp_path: Path) -> None:
    config = tiny_config(model_type, variant)
    assert _save(_build(config), tmp_path) == decoder_shapes(config)


@pytest.mark.parametrize("model_type", sorted({m for m, _ in DECODERS}))
def test_base_models_have_no_prefix_and_no_head(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type, "plain")
    assert _save(_build(config, "AutoModel"), tmp_path) == decoder_shapes(config, root="")


ENCODERS = [
    ("bert", "AutoModel", "", True, ()),
    ("bert", "AutoModelForMaskedLM", "bert.", False, ("cls.predictions",)),
    ("bert", "AutoModelForPreTraining", "bert.", True, ("cls.predictions", "cls.seq_relationship")),
    ("bert", "AutoModelForNextSentencePrediction", "bert.", True, ("cls.seq_relationship",)),
    ("bert", "AutoModelForSequenceClassification", "bert.", True, ("classifier",)),
    ("bert", "AutoModelForTokenClassification", "bert.", False, ("classifier",)),
    ("bert", "AutoModelForQuestionAnswering", "bert.", False, ("qa_outputs",)),
    ("roberta", "AutoModel", "", True, ()),
    ("roberta", "AutoModelForMaskedLM", "roberta.", False, ("lm_head",)),
    ("roberta", "AutoModelForSequenceClassification", "roberta.", False, ("classification head",)),
    ("roberta", "AutoModelForTokenClassification", "roberta.", False, ("classifier",)),
    ("roberta", "AutoModelForQuestionAnswering", "roberta.", False, ("qa_outputs",)),
]


@pytest.mark.parametrize(("model_type", "auto", "root", "pooler", "heads"), ENCODERS)
def test_encoders_have_the_published_names(
    model_type: str, auto: str, root: str, pooler: bool, heads: tuple[str, ...], tmp_path: Path
) -> None:
    # Question answering has two labels, start and end, by its nature; the others take the config's number.
    labels = 2 if heads == ("qa_outputs",) else 3
    config = tiny_config(model_type, "plain") | {"num_labels": labels}
    expected = encoder_shapes(config, root, pooler=pooler)
    for head in heads:
        expected |= {n: (labels if s[0] == 3 else s[0], *s[1:]) for n, s in head_shapes(config, head).items()}
    shapes = _save(_build(config, auto), tmp_path)
    assert shapes == expected
    for target in ("hf", "nn"):
        table = catalog.find(model_type, target)
        expansion = expand(
            table, json.loads((tmp_path / "config.json").read_text()), {}, choose_roots(table, "pt", shapes)
        )
        assert shapes.keys() <= expansion.by_pt.keys()


# --- there and back --------------------------------------------------------------------------


def _equal(one: Any, other: Any) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def _there_and_back(model: Any, family: str, variant: str, folder: Path) -> None:
    """pt2ms and ms2pt of a saved model for every target and layout; the last one is opened by transformers."""
    _save(model, folder)
    words = {name: array.view(np.int32) for name, array in load_file(folder / "model.safetensors").items()}
    config: Mapping[str, object] = json.loads((folder / "config.json").read_text())
    for target in catalog.targets(family):
        table = catalog.find(family, target)
        if unfit(table, variant):
            continue
        for options in layouts(table):
            expansion = expand(table, config, options, choose_roots(table, "pt", words))
            back = translate(expansion, translate(expansion, words), back=True)
            assert back.keys() == words.keys()
            assert all(np.array_equal(back[name], words[name]) for name in words)
    save_file({n: a.view(np.float32) for n, a in back.items()}, folder / "model.safetensors", {"format": "pt"})
    again, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    _equal(again, model)


@pytest.mark.parametrize(("model_type", "variant"), BUILT)
def test_there_and_back(model_type: str, variant: str, tmp_path: Path) -> None:
    auto = "AutoModelForMaskedLM" if model_type in HEADS else "AutoModelForCausalLM"
    _there_and_back(_build(tiny_config(model_type, variant), auto), model_type, variant, tmp_path)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_base_model_there_and_back(model_type: str, tmp_path: Path) -> None:
    _there_and_back(_build(tiny_config(model_type, "plain"), "AutoModel"), model_type, "plain", tmp_path)


# --- defaults --------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [*FAMILIES, "xlm-roberta", "camembert"])
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    for target in catalog.targets(model_type):
        defaults = catalog.find(model_type, target).defaults
        assert defaults == {key: getattr(config, key) for key in defaults}


def test_a_config_that_omits_what_the_class_assumes_still_fits(tmp_path: Path) -> None:
    omitted = {"num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias"}
    config = {k: v for k, v in tiny_config("qwen3", "plain").items() if k not in omitted} | {"num_attention_heads": 32}
    shapes = _save(_build({**config, "hidden_size": 32}), tmp_path)
    expansion = expand(catalog.find("qwen3", "hf"), {**config, "hidden_size": 32})
    assert {
        n: s for e in expansion.entries if e.kind == "map" for n, s in zip(e.pt, e.pt_shapes or (), strict=True)
    } == shapes
