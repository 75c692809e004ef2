"""The diffusers integration on tiny random transformers, against their own dense attention."""

import warnings

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
pytest.importorskip("diffusers")

from wavealign.errors import InputError  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from diffusers import LTXVideoTransformer3DModel, WanTransformer3DModel

from wavealign.integrations import diffusers as integration  # noqa: E402

BLOCK = (16, 8)
OPTIONS = {"block": BLOCK, "profile": "h200", "backend": "reference", "policy": "lockstep"}


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


class Masks:
    """A mask function that counts its calls."""

    def __init__(self, density=2.0):
        self.calls, self.density = 0, density

    def __call__(self, q, k):
        self.calls += 1
        M, N = -(-q.shape[1] // BLOCK[0]), -(-k.shape[1] // BLOCK[1])
        generator = torch.Generator().manual_seed(1)
        return torch.rand(q.shape[2], M, N, generator=generator) < self.density


def forward(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("make", [wan, ltx])
def test_a_full_mask_is_dense_attention(make):
    model, inputs = make()
    dense = forward(model, inputs)
    masks = Masks()
    integration.enable(model, masks, **OPTIONS)
    torch.testing.assert_close(forward(model, inputs), dense)
    assert masks.calls == 2
    found = integration.statistics(model)
    assert (found.calls, found.planned) == (2, 2)
    assert integration.explain(model).splitlines()[-1] == "layer 1, head 1: lockstep, as asked"
    integration.disable(model)
    assert torch.equal(forward(model, inputs), dense)
    assert masks.calls == 2


def test_a_sparse_mask_changes_the_output_and_another_model_stays_dense():
    model, inputs = wan()
    other, _ = wan()
    dense = forward(model, inputs)
    integration.enable(model, Masks(0.4), **OPTIONS)
    assert not torch.allclose(forward(model, inputs), dense)
    assert torch.equal(forward(other, inputs), dense)
    integration.disable(model)
    assert torch.equal(forward(model, inputs), dense)


def test_masks_are_kept_for_some_calls_and_short_sequences_left_alone():
    model, inputs = wan()
    dense = forward(model, inputs)
    masks = Masks()
    integration.enable(model, masks, mask_every=3, **OPTIONS)
    for _ in range(4):
        torch.testing.assert_close(forward(model, inputs), dense)
    assert masks.calls == 4  # two layers, twice each
    assert integration.statistics(model).calls == 8
    integration.disable(model)
    integration.enable(model, masks, min_tokens=1000, **OPTIONS)
    assert torch.equal(forward(model, inputs), dense)
    assert masks.calls == 4


def test_layers_share_buffers():
    model, inputs = wan()
    integration.enable(model, Masks(), **OPTIONS)
    forward(model, inputs)
    planners = [
        state.planner
        for site in integration._enabled(model)
        for state in site.attention._states.values()
    ]
    assert len(planners) == 2
    assert planners[0] is planners[1]


def test_a_named_method_makes_the_masks():
    from wavealign.methods import head_mask

    q, k = torch.randn(2, 300, 4, 16), torch.randn(2, 300, 2, 16)
    made = integration.named_method("xattention")(q, k)
    assert made.shape == (2, 4, 3, 3)
    assert made.dtype == torch.bool
    assert torch.equal(made[1, 3], head_mask("xattention", q[1, :, 3], k[1, :, 1]))


def test_bad_input():
    model, _ = wan()
    with pytest.raises(InputError, match="isn't enabled"):
        integration.disable(model)
    with pytest.raises(InputError, match="Did you mean 'xattention'"):
        integration.enable(model, "xattentio")
    with pytest.raises(InputError, match="mask_every is 0"):
        integration.enable(model, Masks(), mask_every=0)
    integration.enable(model, Masks(), **OPTIONS)
    with pytest.raises(InputError, match="enabled already"):
        integration.enable(model, Masks(), **OPTIONS)
    with pytest.raises(InputError, match="Linear isn't supported"):
        integration.enable(torch.nn.Linear(2, 2), Masks())
