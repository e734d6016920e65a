"""From a ``config.json`` of BERT or RoBERTa to what the encoder computes (transformers 5.24's model code)."""

from __future__ import annotations

from ckptbridge.errors import UnsupportedError
from ckptbridge.verification.nets.config_values import Config, need, value_or
from ckptbridge.verification.nets.spec import EncoderSpec

_PLAIN = {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"}
_MASKED = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM"}


def encoder_spec(config: Config) -> EncoderSpec:
    """The encoder of ``config``. Raises UnsupportedError for another head, and positions that are not absolute."""
    model_type = str(config["model_type"])
    architecture = str((config.get("architectures") or [_PLAIN[model_type]])[0])
    if architecture not in (_PLAIN[model_type], _MASKED[model_type]):
        raise UnsupportedError(
            f"There is no built-in MindSpore forward for the head of '{architecture}'.",
            remedy="Give your own networks with --pt-model and --ms-net.",
        )
    if value_or(config, "position_embedding_type", "absolute") != "absolute":
        raise UnsupportedError("Only encoders with absolute positions have a built-in forward.")
    bert = model_type == "bert"
    act = str(value_or(config, "hidden_act", "gelu"))
    return EncoderSpec(
        family="bert" if bert else "roberta",
        vocab=int(need(config, "vocab_size")),
        hidden=int(need(config, "hidden_size")),
        layers=int(need(config, "num_hidden_layers")),
        heads=int(need(config, "num_attention_heads")),
        width=int(need(config, "intermediate_size")),
        act=act,
        eps=float(value_or(config, "layer_norm_eps", 1e-12)),
        positions=int(need(config, "max_position_embeddings")),
        types=int(value_or(config, "type_vocab_size", 2)),
        head="mlm" if architecture == _MASKED[model_type] else "none",
        head_act=act if bert else "gelu",
        pooler=architecture == _PLAIN[model_type],
        padding=None if bert else int(value_or(config, "pad_token_id", 1)),
    )
