"""The diffusers integration on tiny random transformers, against their own dense attention."""

import copy
import gc
import io
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
pytest.importorskip("diffusers")

from helpers import alive  # noqa: E402
from tiny_transformers import (  # noqa: E402
    TEXT,
    VIDEO,
    forward,
    framepack,
    framepack_alone,
    hunyuan,
    hunyuan15,
    hunyuan_image,
    ltx,
    text_mask,
    wan,
)

from wavealign.errors import InputError  # noqa: E402
from wavealign.integrations import diffusers as integration  # noqa: E402
from wavealign.integrations.padding import Padding  # noqa: E402

BLOCK = (16, 8)
OPTIONS = {"block": BLOCK, "profile": "h200", "backend": "reference", "policy": "lockstep"}


class Masks:
    """A mask function that counts its calls, and keeps how many tokens it was given."""

    def __init__(self, density=2.0):
        self.calls, self.density, self.tokens = 0, density, []

    def __call__(self, q, k):
        self.calls += 1
        self.tokens.append(q.shape[1])
        M, N = -(-q.shape[1] // BLOCK[0]), -(-k.shape[1] // BLOCK[1])
        generator = torch.Generator().manual_seed(1)
        return torch.rand(q.shape[2], M, N, generator=generator) < self.density


def at(inputs, time):
    """A call's arguments at another timestep."""
    return {**inputs, "timestep": torch.full_like(inputs["timestep"], time)}


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


@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (hunyuan, [VIDEO + 4, VIDEO + 7] * 2),
        (hunyuan_image, [VIDEO + 5] * 2),
        (hunyuan15, [VIDEO + 4, VIDEO + 7] * 2),
        (framepack, [48 + 32 + 4 + 1 + 2 + 4, 48 + 32 + 4 + 1 + 2 + 7] * 2),
        (framepack_alone, [48 + 32 + 4 + 1 + 2 + 4] * 2),
    ],
)
def test_a_full_mask_over_padded_text_is_dense_attention(make, tokens):
    model, inputs = make()
    dense = forward(model, inputs)
    assert dense.isfinite().all()
    masks = Masks()
    integration.enable(model, masks, **OPTIONS)
    torch.testing.assert_close(forward(model, inputs), dense)
    assert masks.tokens == tokens
    assert integration.statistics(model).planned == len(tokens)
    assert len(integration.explain(model).splitlines()) == 2 * len(tokens)
    integration.disable(model)
    assert torch.equal(forward(model, inputs), dense)
    assert masks.calls == len(tokens)


def test_sequences_with_other_texts_are_attended_alone():
    model, inputs = hunyuan((4, 7))
    integration.enable(model, Masks(0.4), **OPTIONS)
    together = forward(model, inputs)
    integration.disable(model)
    assert not torch.allclose(together, forward(model, inputs))
    integration.enable(model, Masks(0.4), **OPTIONS)
    for b in range(2):
        alone = forward(model, {name: value[b : b + 1] for name, value in inputs.items()})
        torch.testing.assert_close(together[b : b + 1], alone)


def test_padding_is_never_read():
    model, inputs = hunyuan((4, 7))
    integration.enable(model, Masks(0.4), **OPTIONS)
    before = forward(model, inputs)
    inputs["encoder_hidden_states"][0, 4:] += 100
    torch.testing.assert_close(forward(model, inputs), before)


def test_the_padding_mask_is_read_once_a_forward(monkeypatch):
    model, inputs = hunyuan()
    integration.enable(model, Masks(), **OPTIONS)
    reads = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or real(t))
    for inference in (False, True):
        with torch.inference_mode(inference):
            forward(model, inputs)
    assert reads.count((2, 2)) == 2


def test_a_method_is_told_where_text_begins():
    model, inputs = hunyuan((4, 7))
    told = []

    def masks(q, k, text_tokens):
        told.append((q.shape[1], text_tokens))
        return Masks()(q, k)

    integration.enable(model, masks, **OPTIONS)
    forward(model, inputs)
    assert told == [(VIDEO + 4, 4), (VIDEO + 7, 7)] * 2


def test_masks_are_kept_for_each_text_of_guidance():
    model, inputs = hunyuan((4, 7))
    other = {**inputs, "encoder_attention_mask": text_mask((2, 9))}
    wanted = [forward(model, at(each, time)) for time in (9, 8) for each in (inputs, other)]
    masks = Masks()
    integration.enable(model, masks, mask_every=2, **OPTIONS)
    for time in (9, 8):
        for each in (inputs, other):
            torch.testing.assert_close(forward(model, at(each, time)), wanted.pop(0))
    assert masks.calls == 2 * 2 * 2  # texts, sequences, layers
    site = next(integration.sites_of(model, integration.Site))
    assert [len(kept.masks) for kept in site.kept.values()] == [2, 2]
    forward(model, at({**inputs, "encoder_attention_mask": text_mask((1, 1))}, 7))
    assert [len(kept.masks) for kept in site.kept.values()] == [1]


def test_short_sequences_keep_their_padding_mask():
    for make in (hunyuan, hunyuan15):
        model, inputs = make()
        dense = forward(model, inputs)
        masks = Masks()
        integration.enable(model, masks, min_tokens=VIDEO + TEXT + 1, **OPTIONS)
        assert torch.equal(forward(model, inputs), dense)
        assert masks.calls == 0


@pytest.mark.parametrize(("make", "method"), [(hunyuan, "xattention"), (hunyuan15, "exact")])
def test_named_methods_run_on_padded_text(make, method):
    model, inputs = make()
    dense = forward(model, inputs)
    integration.enable(model, method, **{**OPTIONS, "block": (128, 128)})
    # One block holds everything.
    torch.testing.assert_close(forward(model, inputs), dense)


def test_a_sparse_mask_changes_the_output_and_another_model_stays_dense():
    model, inputs = wan()
    other, _ = wan()
    dense = forward(model, inputs)
    integration.enable(model, Masks(0.4), **OPTIONS)
    assert not torch.allclose(forward(model, inputs), dense)
    assert torch.equal(forward(other, inputs), dense)
    integration.disable(model)
    assert torch.equal(forward(model, inputs), dense)


def test_masks_are_kept_for_some_steps_and_short_sequences_left_alone():
    model, inputs = wan()
    dense = forward(model, inputs)
    masks = Masks()
    integration.enable(model, masks, mask_every=3, **OPTIONS)
    for time in (8, 7, 6, 5):
        out = forward(model, at(inputs, time))
    torch.testing.assert_close(out, dense)
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
        for site in integration.sites_of(model, integration.Site)
        for state in site.attention._lanes.values()
    ]
    assert len(planners) == 2
    assert planners[0] is planners[1]


@pytest.mark.parametrize("mask_every", [None, 1, 3])
def test_texts_of_many_lengths_do_not_add_up(mask_every):
    """Requests with a text of another length each, under a session (None) and a mask method."""
    from wavealign.integrations import diffusers_sessions
    from wavealign.planning.planner import Planner

    model, inputs = hunyuan((1,))
    if mask_every is None:
        diffusers_sessions.enable_session(model, "gsrs", p=(0.9, 0.7), **SESSION)
    else:
        integration.enable(model, Masks(), mask_every=mask_every, **OPTIONS)
    before = set(map(id, alive(Planner)))
    for length in range(1, 41):
        inputs["encoder_hidden_states"] = torch.randn(1, length, 16)
        inputs["encoder_attention_mask"] = text_mask((length,), length)
        run_of(model, inputs)
    assert 1 < len(set(map(id, alive(Planner))) - before) <= 16
    if mask_every is None:
        assert len(diffusers_sessions.session_of(model)._states) == 2
        return
    for site in integration.sites_of(model, integration.Site):
        assert len(site.attention._lanes.values()) == 16
        assert len(site.kept.values()) <= 1


def own_mask(q, k):
    """A mask that depends on the request."""
    draw = torch.Generator().manual_seed(int(q.float().abs().sum() * 1000) % 99991)
    mask = torch.rand(q.shape[2], -(-q.shape[1] // 16), -(-q.shape[1] // 8), generator=draw) < 0.5
    mask[:, :, 0] = True
    return mask


@pytest.mark.parametrize("mask_every", [1, 2])
def test_threads_share_a_transformer(mask_every):
    model, inputs = wan()
    draw = torch.Generator().manual_seed(3)
    shape = inputs["hidden_states"].shape
    requests = [{**inputs, "hidden_states": torch.randn(shape, generator=draw)} for _ in range(6)]
    integration.enable(model, own_mask, mask_every=mask_every, **OPTIONS)

    def run(request):
        return [forward(model, at(request, 9 - i)) for i in range(2 * mask_every)]

    alone = [run(request) for request in requests]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            for outs, wanted in zip(pool.map(run, requests), alone, strict=True):
                for out, expected in zip(outs, wanted, strict=True):
                    torch.testing.assert_close(out, expected)
    told = integration.statistics(model)
    assert told.calls == told.planned + told.reused == 2 * 4 * 6 * 2 * mask_every


def test_threads_have_runs_and_branches_of_their_own():
    model, inputs = wan()
    draw = torch.Generator().manual_seed(4)
    shape = inputs["hidden_states"].shape
    texts = [inputs["encoder_hidden_states"], torch.randn(2, 7, 16, generator=draw)]
    steps = torch.randn(4, 5, *shape, generator=draw)
    integration.enable(model, own_mask, mask_every=3, **OPTIONS)

    def run(latents, times):
        return [
            forward(model, at({**inputs, "hidden_states": x, "encoder_hidden_states": text}, time))
            for x, time in zip(latents, times, strict=True)
            for text in texts
        ]

    # Other threads' timesteps are higher, lower or equal.
    times = [[90 - i, 70 - i, 50 - i, 30 - i, 10 - i] for i in (0, 7, 14, 14)]
    alone = [run(*each) for each in zip(steps, times, strict=True)]
    fresh = integration.statistics(model).calls
    together = threading.Barrier(4)

    def beside(latents, times):
        together.wait()
        return run(latents, times)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            for outs, wanted in zip(pool.map(beside, steps, times), alone, strict=True):
                for out, expected in zip(outs, wanted, strict=True):
                    torch.testing.assert_close(out, expected)
        lanes = [len(site.kept.values()) for site in integration.sites_of(model, integration.Site)]
        assert lanes == [5 * 2] * 2  # threads, this one too; branches
    assert integration.statistics(model).calls == 3 * fresh
    integration.disable(model)
    integration.enable(model, own_mask, **OPTIONS)
    assert not torch.allclose(run(steps[0], times[0])[2], alone[0][2])  # masks were shared


def test_a_mask_that_is_kept_is_a_copy():
    model, inputs = wan()
    shared = torch.zeros(2, 4, 8, dtype=torch.bool)

    def rewritten(q, k):
        shared.data.copy_(own_mask(q, k))
        return shared

    outs = []
    for function in (own_mask, rewritten):
        integration.enable(model, function, mask_every=2, **OPTIONS)
        outs.append([forward(model, at(inputs, time)) for time in (8, 7, 6, 5)])
        integration.disable(model)
    torch.testing.assert_close(outs[1], outs[0])


@pytest.mark.parametrize("method", [own_mask, "xattention"])
@pytest.mark.parametrize("copied", ["deepcopy", "saved"])
@pytest.mark.parametrize("mask_every", [1, 2])
def test_an_enabled_transformer_is_copied_and_saved(copied, method, mask_every, monkeypatch):
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.transformers import transformer_wan

    model, inputs = wan()
    options = {**OPTIONS, "block": (128, 128)} if method == "xattention" else OPTIONS
    integration.enable(model, method, mask_every=mask_every, **options)
    wanted = forward(model, inputs)
    if copied == "deepcopy":
        other = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        # Another process has diffusers' own operation until the model comes.
        monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", dispatch_attention_fn)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert integration.statistics(other).calls == 0
    torch.testing.assert_close(forward(other, inputs), wanted)
    assert integration.statistics(other).planned == 2
    assert integration.statistics(model).calls == 2
    integration.disable(other)
    assert not other._forward_pre_hooks
    assert not other._forward_hooks
    assert len(model._forward_hooks) == mask_every - 1


def test_no_layer_keeps_its_mask():
    model, inputs = hunyuan((5, 5))
    made = []

    def masks(q, k):
        mask = Masks()(q, k)
        made.append(weakref.ref(mask))
        return mask

    integration.enable(model, masks, **OPTIONS)
    forward(model, inputs)
    gc.collect()
    assert [mask() for mask in made] == [None, None]


def test_a_named_method_makes_the_masks():
    from wavealign.methods import head_mask

    q, k = torch.randn(2, 300, 4, 16), torch.randn(2, 300, 2, 16)
    made = integration.named_method("xattention")(q, k)
    assert made.shape == (2, 4, 3, 3)
    assert made.dtype == torch.bool
    assert torch.equal(made[1, 3], head_mask("xattention", q[1, :, 3], k[1, :, 1]))


def test_a_named_method_makes_text_dense():
    from wavealign.methods.params import Exact

    torch.manual_seed(0)
    q, k = 4 * torch.randn(1, 600, 2, 16), torch.randn(1, 600, 2, 16)
    method = integration.named_method("exact", Exact(mass=0.3))
    assert not method(q, k)[0, :, 4].all()
    made = method(q, k, text_tokens=20)
    assert made[0, :, 4].all()
    assert made[0, :, :, 4].all()
    assert torch.equal(made[0, :, :4, :4], method(q, k)[0, :, :4, :4])


def test_padding_masks():
    padding = Padding()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert padding.lengths(mask, 2, 2, 2).tokens == (3, 4)
    assert padding.lengths(mask[:, None, None], 2, 2, 2).tokens == (3, 4)
    assert padding.lengths(mask.long(), 2, 3, 4).tokens == (6, 7)
    assert padding.lengths(None, 2, 3, 4).tokens == (7, 7)
    mask[0, 2] = False
    assert padding.lengths(mask, 2, 2, 2).tokens == (2, 4)
    mask[1, 3] = False
    assert padding.lengths(mask, 2, 2, 2).tokens == (2, 3)  # the same tensor, changed


REWRITES = {
    "numpy": lambda buffer, mask, lengths: np.copyto(buffer, text_mask(lengths).numpy()),
    "data": lambda buffer, mask, lengths: mask.data.copy_(text_mask(lengths)),
    "dlpack": lambda buffer, mask, lengths: torch.from_dlpack(buffer).copy_(text_mask(lengths)),
}


@pytest.mark.parametrize("rewrite", REWRITES)
@torch.no_grad()
def test_a_padding_mask_rewritten_unseen_is_read_anew(rewrite):
    """One tensor for every forward, which goes to the layers as it is."""
    model, _ = hunyuan()
    masks = Masks()
    integration.enable(model, masks, **OPTIONS)
    buffer = text_mask((4, 4)).numpy()
    mask = torch.from_numpy(buffer)
    for given in ((7, 2), (1, 9), (5, 5)):
        REWRITES[rewrite](buffer, mask, given)
        assert mask._version == 0
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            block.attn(torch.randn(2, VIDEO, 20), torch.randn(2, TEXT, 20), mask)
    layer = [[VIDEO + 7, VIDEO + 2], [VIDEO + 1, VIDEO + 9], [VIDEO + 5]]
    assert masks.tokens == [tokens for forward in layer for tokens in forward * 2]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1, 1, 0, 1]]), "sequence 0 has gaps"),
        (torch.tensor([[1, 0, 0, 0]]), "leaves 1 tokens of a sequence with 2 tokens of video"),
        (torch.zeros(1, 1, 1, 4), "of torch.float32; expected bool"),
        (torch.ones(1, 1, 4, 4, dtype=torch.bool), "expected one over keys"),
        (torch.ones(2, 4, dtype=torch.bool), "for 1 sequences"),
        (torch.ones(1, 3, dtype=torch.bool), "of 2 video and 2 text tokens"),
    ],
)
def test_bad_padding_masks(mask, message):
    with pytest.raises(InputError, match=message):
        Padding().lengths(mask, 1, 2, 2)


def test_what_a_block_mask_cannot_say_is_refused():
    model, inputs = ltx()
    integration.enable(model, Masks(), **OPTIONS)
    module = model.transformer_blocks[0].attn1
    x = torch.randn(1, 60, 16)
    with pytest.raises(InputError, match="leaves 10 tokens"):
        module(x, attention_mask=torch.arange(60)[None] < 10)
    own = module.processor._site.original
    own._parallel_config = object()
    with pytest.raises(InputError, match="context parallelism"):
        forward(model, inputs)


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


SESSION = {
    "steps": 5, "search_steps": (1, 3), "block": (16, 8), "policy": "lockstep", "profile": "h200",
    "backend": "reference",
}  # fmt: skip


def run_of(model, inputs):
    """Outputs at the timesteps of a run."""
    timestep = inputs["timestep"]
    return [
        forward(model, {**inputs, "timestep": torch.full_like(timestep, t)})
        for t in (900, 700, 500, 300, 100)
    ]


@pytest.mark.parametrize("make", [hunyuan, hunyuan_image, hunyuan15])
def test_a_session_of_everything_is_the_model_with_text_of_any_length(make):
    from wavealign.integrations import diffusers_sessions

    model, inputs = make()
    expected = run_of(model, inputs)
    diffusers_sessions.enable_session(model, "gsrs", p=(1.0, 1.0), **SESSION)
    for out, dense in zip(run_of(model, inputs), expected, strict=True):
        torch.testing.assert_close(out, dense)
    found = diffusers_sessions.session_of(model).statistics
    sites = found.searched // 2
    assert (found.full, found.reused, found.plans) == (sites, 2 * sites, 2 * sites)
    integration.disable(model)
    torch.testing.assert_close(run_of(model, inputs), expected, rtol=0, atol=0)


def test_a_run_belongs_to_one_thread_while_it_calls():
    from wavealign.integrations import diffusers_sessions

    model, inputs = wan()
    expected = run_of(model, inputs)
    diffusers_sessions.enable_session(model, "gsrs", p=(1.0, 1.0), **SESSION)
    problems = []

    def other():
        try:
            run_of(model, inputs)
        except InputError as problem:
            problems.append(str(problem))

    def meanwhile(*_):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hook = model.blocks[1].register_forward_pre_hook(meanwhile)
    for out, dense in zip(run_of(model, inputs), expected, strict=True):
        torch.testing.assert_close(out, dense)
    assert len(problems) == len(expected)
    assert "another thread's call of this transformer hasn't ended" in problems[0]
    hook.remove()
    meanwhile()  # between runs any thread may begin one
    assert len(problems) == len(expected)


def turned_grid(make, inputs):
    """The same call on a grid of as many tokens, height and width exchanged."""
    if make is ltx:
        return {**inputs, "height": inputs["width"], "width": inputs["height"]}
    if make is ltx_by_coordinates:
        return {**inputs, "video_coords": inputs["video_coords"][:, [0, 2, 1]]}
    return {**inputs, "hidden_states": inputs["hidden_states"].transpose(3, 4)}


def ltx_by_coordinates():
    """LTX with the places of its tokens in place of a grid, as for conditions."""
    model, inputs = ltx()
    sizes = [inputs.pop(name) for name in ("num_frames", "height", "width")]
    places = torch.cartesian_prod(*(torch.arange(float(n)) for n in sizes))
    return model, {**inputs, "video_coords": places.T[None]}


@pytest.mark.parametrize("make", [wan, ltx, ltx_by_coordinates, hunyuan, hunyuan15])
def test_another_grid_in_mid_run_has_masks_of_its_own(make):
    model, inputs = make()
    other = turned_grid(make, inputs)
    calls = [(inputs, 9), (other, 8), (inputs, 7), (other, 6), (inputs, 5)]
    integration.enable(model, own_mask, mask_every=5, **OPTIONS)
    outs = [forward(model, at(each, time)) for each, time in calls]
    integration.disable(model)
    for own in (inputs, other):  # each grid as if it had been alone
        integration.enable(model, own_mask, mask_every=5, **OPTIONS)
        for (each, time), out in zip(calls, outs, strict=True):
            if each is own:
                torch.testing.assert_close(forward(model, at(each, time)), out)
        integration.disable(model)


@pytest.mark.parametrize("make", [wan, ltx, ltx_by_coordinates, hunyuan, hunyuan15])
def test_another_grid_in_mid_run_is_refused_and_a_new_run_follows_it(make):
    from wavealign.integrations import diffusers_sessions

    model, inputs = make()
    turned = turned_grid(make, inputs)
    dense = run_of(model, turned)
    diffusers_sessions.enable_session(model, "gsrs", p=(1.0, 1.0), **SESSION)
    forward(model, {**inputs, "timestep": torch.full_like(inputs["timestep"], 900)})
    later = {**turned, "timestep": torch.full_like(inputs["timestep"], 700)}
    with pytest.raises(InputError, match=r"step 1 has tokens of .* the run began with (3x|others)"):
        forward(model, later)
    diffusers_sessions.restart(model)
    for out, wanted in zip(run_of(model, turned), dense, strict=True):
        torch.testing.assert_close(out, wanted)


def test_sequences_of_a_batch_are_searched_on_their_own():
    from wavealign.integrations import diffusers_sessions

    model, inputs = hunyuan((4, 7))
    dense = run_of(model, inputs)
    diffusers_sessions.enable_session(model, "gsrs", p=(0.5, 0.4), **SESSION)
    together = run_of(model, inputs)
    session = diffusers_sessions.session_of(model)
    masks = [session.mask(1, f"cond, sequence {i}") for i in (0, 1)]
    assert [tuple(mask.shape) for mask in masks] == [(1, 2, 4, 8), (1, 2, 5, 9)]
    assert not masks[1].all()
    assert not torch.allclose(together[-1], dense[-1], rtol=1e-4)
    for i in (0, 1):
        alone = run_of(model, {name: value[i : i + 1] for name, value in inputs.items()})
        assert torch.equal(diffusers_sessions.session_of(model).mask(1), masks[i])
        for whole, own in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[i : i + 1], own)


def test_sessions_refuse_frames_of_the_past():
    from wavealign.integrations import diffusers_sessions

    model, _ = framepack()
    with pytest.raises(InputError, match="its tokens are no grid"):
        diffusers_sessions.enable_session(model, "gsrs")


def test_masks_are_of_one_run_and_branch():
    model, inputs = wan()
    texts = [inputs["encoder_hidden_states"], torch.randn(2, 7, 16)]
    made = []

    def masks(q, k):
        made.append(now)
        return Masks()(q, k)

    integration.enable(model, masks, mask_every=2, **OPTIONS)
    runs = [(9,), (9, 8, 7), (9, 8)]  # the first is broken off
    for run, times in enumerate(runs):
        latents = torch.randn_like(inputs["hidden_states"])
        for time in times:
            for branch, text in enumerate(texts):
                now = run, time, branch
                given = {"hidden_states": latents, "encoder_hidden_states": text}
                forward(model, at({**inputs, **given}, time))
    wanted = [(run, t, b) for run, t in ((0, 9), (1, 9), (1, 7), (2, 9)) for b in (0, 1)]
    assert made == [each for each in wanted for _ in range(2)]  # layers
    integration.disable(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_session_after_a_run_broken_off_is_as_new():
    from wavealign.integrations import diffusers_sessions

    model, inputs = wan()
    other = {**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])}
    options = {**SESSION, "search_steps": (0, 3), "p": (0.5, 0.4)}
    diffusers_sessions.enable_session(model, "gsrs", **options)
    wanted = run_of(model, inputs)
    forward(model, at(other, 900))
    for out, fresh in zip(run_of(model, inputs), wanted, strict=True):
        assert torch.equal(out, fresh)
    assert diffusers_sessions.session_of(model).statistics.searched == 4


@pytest.mark.parametrize("session", [False, True])
def test_first_steps_of_one_rounded_timestep_need_a_restart(session):
    from wavealign.integrations import diffusers_sessions

    model, inputs = wan()
    model.to(torch.bfloat16)

    def call(time):
        given = {**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])}
        given["timestep"] = torch.full((2,), time)
        forward(model, {name: value.to(torch.bfloat16) for name, value in given.items()})

    masks = Masks()
    if session:
        diffusers_sessions.enable_session(model, "gsrs", p=(1.0, 1.0), **SESSION)
    else:
        integration.enable(model, masks, mask_every=5, **OPTIONS)
    call(1000.0)
    with pytest.raises(
        InputError, match=r"rounded to the first's timestep.*restart\(transformer\)"
    ):
        call(998.5)
    for run in range(2):
        integration.restart(model)
        for time in (1000.0, 998.5, 996.0, 992.0, 988.0):
            call(time)
        if session:
            found = diffusers_sessions.session_of(model).statistics
            assert (found.full, found.searched, found.reused) == (2, 4, 4)
        else:
            assert masks.calls == 2 + 2 * (run + 1)  # one a layer and run
    integration.disable(model)
    with pytest.raises(InputError, match="isn't enabled"):
        integration.restart(model)


def test_a_session_counts_steps_of_one_rounded_timestep():
    from wavealign.integrations import diffusers_sessions

    model, inputs = hunyuan15()
    model.to(torch.bfloat16)
    inputs = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    diffusers_sessions.enable_session(model, "gsrs", p=(1.0, 1.0), **SESSION)
    for time in (1000.0, 996.0, 996.0, 992.0, 992.0):
        forward(model, at(inputs, time))
    found = diffusers_sessions.session_of(model).statistics
    sites = found.searched // 2
    assert (found.full, found.reused) == (sites, 2 * sites)


def test_sessions_refuse_what_they_cannot_follow():
    from diffusers import FirstBlockCacheConfig

    from wavealign.integrations import diffusers_sessions

    model, inputs = wan()
    diffusers_sessions.enable_session(model, "gsrs", p=(0.5, 0.4), **SESSION)
    forward(model, at(inputs, 100))
    with pytest.raises(InputError, match="timestep 300 after 100"):
        forward(model, at(inputs, 300))
    forward(model, at(inputs, 90))
    late = {**inputs, "encoder_hidden_states": torch.randn(2, 7, 16)}
    with pytest.raises(InputError, match=r"skips step 0.*guidance that begins late"):
        forward(model, at(late, 90))
    model.enable_cache(FirstBlockCacheConfig())
    diffusers_sessions.restart(model)
    with pytest.raises(InputError, match=r"has a cache that skips layers \(fbc_"):
        forward(model, at(inputs, 900))
    integration.disable(model)
    with pytest.raises(InputError, match="has a cache that skips layers"):
        diffusers_sessions.enable_session(model, "gsrs", p=(0.5, 0.4), **SESSION)
