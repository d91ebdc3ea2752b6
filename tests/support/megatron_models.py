"""Flags of Megatron's models that several tests train, beside those of tests/megatron/conftest.py."""

MODELS = {
    "gpt": {},
    "llama": {
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 2,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
}
