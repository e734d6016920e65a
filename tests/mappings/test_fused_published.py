"""The hand-written PyTorch side of the families that fuse is what transformers writes, where it has the family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_fused import Shapes, shapes, tiny_config
from safetensors import safe_open

from ckptbridge.tables import catalog
from ckptbridge.tables.expand import choose_roots, expand
from ckptbridge.tables.proof import prove

transformers = pytest.importorskip("transformers")

# The class with the language model's head, and the one without; the prefix of each.
CLASSES = {
    ("phi3", "plain"): ("Phi3ForCausalLM", "model."),
    ("phi3", "tied"): ("Phi3ForCausalLM", "model."),
    ("gpt_neox", "plain"): ("GPTNeoXForCausalLM", "gpt_neox."),
    ("gpt_neox", "unbiased"): ("GPTNeoXForCausalLM", "gpt_neox."),
    ("gpt2", "plain"): ("GPT2LMHeadModel", "transformer."),
    ("gpt2", "untied"): ("GPT2LMHeadModel", "transformer."),
    ("gpt2", "four times"): ("GPT2Model", ""),
    ("glm4", "plain"): ("Glm4ForCausalLM", "model."),
    ("glm4", "unbiased"): ("Glm4Model", ""),
    ("glm4", "tied"): ("Glm4ForCausalLM", "model."),
    ("glm4_moe", "plain"): ("Glm4MoeForCausalLM", "model."),
    ("glm4_moe", "normed"): ("Glm4MoeForCausalLM", "model."),
    ("deepseek_v4", "saved by transformers"): ("DeepseekV4ForCausalLM", "model."),
}


def _saved(name: str, config: dict[str, object], folder: Path) -> Shapes:
    """What transformers writes for a model of this class: names and shapes of the file."""
    model_class = getattr(transformers, name)
    tokens = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    settings = {key: value for key, value in config.items() if key != "model_type"} | tokens
    model_class(model_class.config_class(**settings)).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("family", "variant"), CLASSES)
def test_transformers_writes_these_names_and_shapes(family: str, variant: str, tmp_path: Path) -> None:
    name, root = CLASSES[family, variant]
    config = tiny_config(family, variant)
    saved = _saved(name, config, tmp_path)
    assert saved == shapes(config, root)


@pytest.mark.parametrize("family", sorted({family for family, _ in CLASSES}))
def test_the_config_that_transformers_writes_gives_the_same_tensors(family: str, tmp_path: Path) -> None:
    """What config.json omits or renames is covered by the table's defaults."""
    variant = "saved by transformers" if family == "deepseek_v4" else "plain"
    saved = _saved(CLASSES[family, variant][0], tiny_config(family, variant), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    if family == "glm4_moe":
        # transformers leaves the multi-token prediction layers out, and this value as it is.
        assert written["num_nextn_predict_layers"] in (0, 1)
        written["num_nextn_predict_layers"] = 0
    for target in catalog.targets(family):
        table = catalog.find(family, target)
        expansion = expand(table, written, None, choose_roots(table, "pt", saved))
        prove(expansion)
        mapped = {
            n: s for e in expansion.entries if e.kind == "map" for n, s in zip(e.pt, e.pt_shapes or (), strict=True)
        }
        assert mapped == saved
