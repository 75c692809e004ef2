"""Tiny random video transformers of diffusers, and their inputs."""

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from diffusers import (
        HunyuanVideo15Transformer3DModel,
        HunyuanVideoFramepackTransformer3DModel,
        HunyuanVideoTransformer3DModel,
        LTXVideoTransformer3DModel,
        WanTransformer3DModel,
    )


def wan():
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 3, 10, 8),
        "timestep": torch.tensor([5, 5]),
        "encoder_hidden_states": torch.randn(2, 7, 16),
    }
    return model.eval(), inputs


def ltx():
    torch.manual_seed(0)
    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, num_layers=2, caption_channels=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 60, 4),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "timestep": torch.tensor([5]),
        "encoder_attention_mask": torch.ones(1, 7, dtype=torch.long),
        "num_frames": 3,
        "height": 4,
        "width": 5,
    }
    return model.eval(), inputs


HUNYUAN = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10,
    "num_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1,
    "text_embed_dim": 16, "rope_axes_dim": (2, 4, 4),
}  # fmt: skip
VIDEO, TEXT = 60, 9  # tokens of the models below, padding included


def text_mask(lengths, tokens=TEXT):
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()


def hunyuan(lengths=(4, 7), image_condition_type=None):
    torch.manual_seed(0)
    model = HunyuanVideoTransformer3DModel(
        **HUNYUAN, num_single_layers=1, pooled_projection_dim=8,
        image_condition_type=image_condition_type,
    )  # fmt: skip
    B = len(lengths)
    inputs = {
        "hidden_states": torch.randn(B, 4, 3, 4, 5),
        "timestep": torch.full((B,), 5),
        "encoder_hidden_states": torch.randn(B, TEXT, 16),
        "encoder_attention_mask": text_mask(lengths),
        "pooled_projections": torch.randn(B, 8),
        "guidance": torch.full((B,), 6000.0),
    }
    return model.eval(), inputs


def hunyuan_image():
    return hunyuan((5, 5), "token_replace")


def hunyuan15():
    torch.manual_seed(0)
    model = HunyuanVideo15Transformer3DModel(
        **{**HUNYUAN, "num_layers": 2}, text_embed_2_dim=12, image_embed_dim=8,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 3, 4, 5),
        "timestep": torch.tensor([5.0, 5.0]),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "encoder_attention_mask": text_mask((3, 5), 5),
        "encoder_hidden_states_2": torch.randn(2, 2, 12),
        "encoder_attention_mask_2": text_mask((1, 2), 2),
        "image_embeds": torch.zeros(2, 2, 8),
    }
    return model.eval(), inputs


def framepack(lengths=(4, 7)):
    torch.manual_seed(0)
    model = HunyuanVideoFramepackTransformer3DModel(
        **{**HUNYUAN, "patch_size": 2}, num_single_layers=1, pooled_projection_dim=8,
        has_image_proj=True, image_proj_dim=8, has_clean_x_embedder=True,
    )  # fmt: skip
    B = len(lengths)
    inputs = {
        "hidden_states": torch.randn(B, 4, 3, 8, 8),
        "timestep": torch.full((B,), 5),
        "encoder_hidden_states": torch.randn(B, TEXT - 2, 16),
        "encoder_attention_mask": text_mask(lengths, TEXT - 2),
        "pooled_projections": torch.randn(B, 8),
        "guidance": torch.full((B,), 6000.0),
        "image_embeds": torch.randn(B, 2, 8),
        "indices_latents": torch.arange(7, 10),
        "latents_clean": torch.randn(B, 4, 2, 8, 8),
        "indices_latents_clean": torch.tensor([0, 6]),
        "latents_history_2x": torch.randn(B, 4, 2, 8, 8),
        "indices_latents_history_2x": torch.arange(4, 6),
        "latents_history_4x": torch.randn(B, 4, 4, 8, 8),
        "indices_latents_history_4x": torch.arange(4),
    }
    return model.eval(), inputs


def framepack_alone():
    return framepack((4,))


def forward(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]
