"""Keys that drafters' configs copy from their targets, where a drafter's layers do not use them.

DeepSpec and others begin with the target's config. A drafter's layers are Qwen3's all the same, and
its tensors show it: none has a gate, a delta rule or a part of a head that is not rotated.
"""

from __future__ import annotations

from collections.abc import Mapping

from strobe.models.config_readers.fields import HINT, Fields

MEANINGLESS: Mapping[str, str] = {
    "attn_output_gate": "gate of Qwen3.5's attention, which would double the rows of q_proj",
    "output_gate_type": "activation of that gate",
    "full_attention_interval": "distance of layers with attention; layer_types names them",
    "linear_conv_kernel_dim": "size of layers with a delta rule",
    "linear_key_head_dim": "the same",
    "linear_value_head_dim": "the same",
    "linear_num_key_heads": "the same",
    "linear_num_value_heads": "the same",
    "mamba_ssm_dtype": "dtype of such a layer's state",
    "mtp_num_hidden_layers": "the target's own drafting layers",
    "mtp_use_dedicated_embeddings": "the same",
    "mrope_section": "parts of a rope for images; a drafter sees text positions",
    "mrope_interleaved": "the same",
    "target_model_type": "model_type of the target",
}
"""Keys whose values have no effect on a drafter, and what they mean in a target. Shares of a rotary
embedding are read in `zlab.read_rope`, since MiMo's drafters use them."""


def check_copies(fields: Fields) -> None:
    """Accept the keys above. Raises ValueError if a copied key contradicts what the drafter's
    layers do."""
    for key in MEANINGLESS:
        fields.get(key)
    original = fields.object("rope_scaling").get("original_max_position_embeddings")
    length = fields.get("initial_context_length")  # gpt-oss's
    if None not in (original, length) and original != length:
        raise ValueError(
            f"{fields.path}: initial_context_length is {length!r}, but "
            f"original_max_position_embeddings in rope_scaling {original!r}; {HINT}"
        )
