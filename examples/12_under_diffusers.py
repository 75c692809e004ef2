"""Put WaveAlign under a diffusers transformer, and record its Q and K.

You will learn how `enable` lets the self-attention of a video transformer run on masks of a named
method, how to see what was done, and how `disable` gives the model back as it was. The model is a
tiny Wan transformer with random weights; with a pipeline it would be `pipe.transformer`. At the
end `capture_qk` records queries and keys as attention sees them, for the other examples.

    pip install '.[diffusers]'
    python examples/12_under_diffusers.py

It prints how far sparse attention moves the model's output, the plan of each layer, and the files
of Q and K.
"""

import tempfile

import torch
from diffusers import WanTransformer3DModel

from wavealign.integrations import diffusers
from wavealign.integrations.capture import Wanted, capture_qk

torch.manual_seed(0)
model = WanTransformer3DModel(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=64, in_channels=4,
    out_channels=4, text_dim=16, freq_dim=32, ffn_dim=64, num_layers=2,
).eval()  # fmt: skip
inputs = {
    "hidden_states": torch.randn(1, 4, 4, 32, 32),  # 4 x 16 x 16 = 1,024 tokens of video
    "timestep": torch.tensor([500]),
    "encoder_hidden_states": torch.randn(1, 7, 16),
}

with torch.inference_mode():
    dense = model(**inputs).sample
    diffusers.enable(
        model, method="xattention", policy="lockstep", profile="h200", backend="reference"
    )
    sparse = model(**inputs).sample
    print(f"moved by {float((sparse - dense).norm() / dense.norm()):.1%} of the output's norm")
    print(diffusers.explain(model))
    print(diffusers.statistics(model))
    diffusers.disable(model)
    print("the same again without it:", torch.equal(model(**inputs).sample, dense))

    with tempfile.TemporaryDirectory() as folder:
        with capture_qk(model, folder, Wanted(layers=[0, 1], steps=[0])) as capture:
            model(**inputs)
        for path in capture.files:
            print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB of Q and K")
