"""What a processor of the model asks of attention is done exactly, or refused; never left aside."""

import contextlib
import copy
import gc
import itertools
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
pytest.importorskip("diffusers")

import diffusers.models.transformers.transformer_wan as wan_module  # noqa: E402
from faults import Fault, Interrupt  # noqa: E402
from tiny_transformers import forward, hunyuan, hunyuan15, ltx, wan  # noqa: E402

from wavealign.errors import InputError  # noqa: E402
from wavealign.integrations import diffusers as integration  # noqa: E402
from wavealign.integrations import dispatch  # noqa: E402
from wavealign.integrations.capture import Wanted, capture_qk  # noqa: E402
from wavealign.integrations.padding import Lengths  # noqa: E402
from wavealign.integrations.watch import Place  # noqa: E402
from wavealign.methods import METHODS, params  # noqa: E402

CPU = {"profile": "h200", "backend": "reference"}
OPTIONS = {**CPU, "block": (16, 8), "policy": "lockstep"}
ORIGINAL = wan_module.dispatch_attention_fn


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    if wan_module.dispatch_attention_fn is not ORIGINAL:
        gc.collect()
    assert wan_module.dispatch_attention_fn is ORIGINAL


def full(q, k):
    return torch.ones(q.shape[2], -(-q.shape[1] // 16), -(-q.shape[1] // 8), dtype=torch.bool)


def sparse(q, k):
    return full(q, k).tril()


class Processor:
    """A user's own, which calls the model's operation with arguments of its own."""

    _attention_backend = _parallel_config = None

    def __init__(self, operation=None, **options):
        self.operation, self.options = operation, options

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, *_):
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        heads = [t.unflatten(2, (attn.heads, -1)) for t in (q, k, attn.to_v(hidden_states))]
        operation = self.operation or wan_module.dispatch_attention_fn
        return attn.to_out[0](operation(*heads, **self.options).flatten(2, 3))


def own(**options):
    model, inputs = wan()
    for block in model.blocks:
        block.attn1.processor = Processor(**options)
    return model, inputs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 12**-0.5},
        {"scale": 1.0},
        {"scale": 0.0},
        {"dropout_p": 0.0, "is_causal": False, "enable_gqa": True, "attention_kwargs": {}},
    ],
)
def test_what_can_be_honoured_is(options):
    model, inputs = own(**options)
    dense = forward(model, inputs)
    integration.enable(model, full, **OPTIONS)
    torch.testing.assert_close(forward(model, inputs), dense)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "is_causal=True"),
        ({"dropout_p": 0.1}, r"dropout_p=0\.1"),
        ({"attention_kwargs": {"sinks": 4}}, "sinks=4"),
        ({"window_size": 7}, "window_size=7"),
        ({"attn_mask": torch.ones(60, 60).bool()}, "beside the block mask"),
        ({"parallel_config": object()}, "context parallelism"),
        ({"operation": ORIGINAL}, "attended without .*transformer_wan.dispatch_attention_fn"),
    ],
)
def test_what_a_block_mask_cannot_say_is_refused(options, message):
    model, inputs = own(**options)
    integration.enable(model, full, **OPTIONS)
    with pytest.raises(InputError, match=message):
        forward(model, inputs)


def test_grouped_queries_and_keys_of_another_length():
    from wavealign.integrations.dispatch import _Call
    from wavealign.integrations.padding import Lengths

    model, _ = wan()
    integration.enable(model, full, **OPTIONS)
    site = next(integration.sites_of(model, integration.Site))
    q, k, v = torch.randn(1, 60, 4, 12), *torch.randn(2, 1, 60, 2, 12)
    call = _Call(site, Lengths((60,), 60))
    torch.testing.assert_close(
        call.attend(q, k, v, enable_gqa=True), ORIGINAL(q, k, v, enable_gqa=True)
    )
    with pytest.raises(InputError, match=r"expected as many"):
        call.attend(q, k, v)
    with pytest.raises(InputError, match=r"keys \[1, 30, 2, 12\]"):
        call.attend(q, k[:, :30], v[:, :30], enable_gqa=True)


class Wrapper:
    """Somebody's, around a processor."""

    _attention_backend = _parallel_config = None

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *arguments, **named):
        return self.inner(*arguments, **named)


class Silent:
    """Somebody's that knows nothing of backends and devices."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *arguments, **named):
        return self.inner(*arguments, **named)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("make", [wan, ltx, hunyuan, hunyuan15])
def test_context_parallelism_is_refused_in_either_order(make, wrapped):
    model, inputs = make()
    integration.enable(model, full, **OPTIONS)
    modules = integration._attentions(model)
    for module in modules:
        if wrapped:
            module.processor = Wrapper(module.processor)
        module.processor._parallel_config = object()
    with pytest.raises(InputError, match="context parallelism"):
        forward(model, inputs)
    if not wrapped:
        integration.disable(model)
        with pytest.raises(InputError, match="context parallelism"):
            integration.enable(model, full, **OPTIONS)


@pytest.mark.parametrize("make", [wan, ltx])
def test_a_split_model_is_refused_whatever_its_processors_say(make):
    """diffusers tells processors that have the attribute, and splits the sequence anyway."""
    model, inputs = make()
    dense = forward(model, inputs)
    integration.enable(model, full, **OPTIONS)
    for module in integration._attentions(model):
        module.processor = Silent(module.processor)
    heads = types.SimpleNamespace(context_parallel_config=None)
    for config, refused in ((heads, False), (object(), True)):
        model._parallel_config = config
        if refused:
            with pytest.raises(InputError, match="context parallelism"):
                forward(model, inputs)
        else:
            torch.testing.assert_close(forward(model, inputs), dense)
    integration.disable(model)
    assert not model._forward_pre_hooks
    with pytest.raises(InputError, match="context parallelism"):
        integration.enable(model, full, **OPTIONS)


def test_a_sequence_that_torch_splits_is_refused(monkeypatch):
    parallel = pytest.importorskip(dispatch._TORCHS_PARALLEL)
    model, inputs = wan()
    integration.enable(model, full, **OPTIONS)
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", real)
    parallel._distribute_function(real, torch.nn.functional, None, None, None)
    with pytest.raises(InputError, match="context parallelism"):
        forward(model, inputs)
    parallel._restore_function(
        torch.nn.functional.scaled_dot_product_attention, torch.nn.functional
    )
    forward(model, inputs)


def test_a_backend_that_is_set_meanwhile_stays():
    model, inputs = wan()
    integration.enable(model, full, **OPTIONS)
    model.set_attention_backend("_native_math")
    integration.disable(model)
    assert {b.attn1.processor._attention_backend.value for b in model.blocks} == {"_native_math"}
    forward(model, inputs)


@pytest.mark.parametrize("first", ["capture", "enable"])
@pytest.mark.parametrize("last", ["capture", "enable"])
def test_capture_and_enable_nest_in_any_order(tmp_path, first, last):
    model, inputs = wan()
    dense = forward(model, inputs)
    capture = capture_qk(model, tmp_path, Wanted([1]))
    if first == "enable":
        integration.enable(model, sparse, **OPTIONS)
    recorded = capture.__enter__()
    if first == "capture":
        integration.enable(model, sparse, **OPTIONS)
    other = forward(model, inputs)
    assert not torch.allclose(other, dense)
    assert len(recorded.files) == 1
    if last == "enable":
        capture.__exit__(None, None, None)
        assert torch.equal(forward(model, inputs), other)
        integration.disable(model)
    else:
        integration.disable(model)
        assert torch.equal(forward(model, inputs), dense)
        capture.__exit__(None, None, None)
    assert torch.equal(forward(model, inputs), dense)
    assert wan_module.dispatch_attention_fn is ORIGINAL


def test_the_module_is_itself_again_with_the_last_model():
    (one, inputs), (two, _) = wan(), wan()
    integration.enable(one, full, **OPTIONS)
    integration.enable(two, full, **OPTIONS)
    integration.disable(one)
    assert wan_module.dispatch_attention_fn is not ORIGINAL
    three = copy.deepcopy(two)
    integration.disable(two)
    forward(three, inputs)  # a copy is enabled, too
    assert integration.statistics(three).calls == 2
    del three
    gc.collect()
    assert wan_module.dispatch_attention_fn is ORIGINAL


def test_ctrl_c_in_a_site_leaves_other_models_dense():
    (model, inputs), (other, _) = wan(), wan()
    dense = forward(other, inputs)
    integration.enable(model, sparse, **OPTIONS)
    for at in itertools.count(1):
        fault = Fault("line", at, "integrations/dispatch.py")
        with contextlib.suppress(Interrupt), fault:
            forward(model, inputs)
        assert torch.equal(forward(other, inputs), dense)
        if not fault.failed:
            break
    assert at > 40


@pytest.mark.parametrize("mask_every", [1, 2])
@pytest.mark.parametrize("changed", ["enable", "disable"])
def test_ctrl_c_leaves_a_model_enabled_or_not_and_never_by_halves(changed, mask_every):
    model, inputs = wan()
    changes = {
        "enable": lambda: integration.enable(model, sparse, mask_every=mask_every, **OPTIONS),
        "disable": lambda: integration.disable(model),
    }
    outs = {"disable": forward(model, inputs)}
    changes["enable"]()
    outs["enable"] = forward(model, inputs)
    changes["disable"]()
    left = []
    for at in itertools.count(1):
        if changed == "disable":
            changes["enable"]()
        fault = Fault("line", at, "integrations/")
        with contextlib.suppress(Interrupt), fault:
            changes[changed]()
        out = forward(model, inputs)
        left += [name for name, wanted in outs.items() if torch.equal(out, wanted)]
        assert len(left) == at
        if left[-1] == "enable":
            changes["disable"]()
        if not fault.failed:
            break
    assert set(left) == set(outs)
    assert left[-1] == changed


def test_a_model_compiles_in_one_graph_after_disable():
    model, inputs = wan()
    dense = forward(model, inputs)
    integration.enable(model, full, **OPTIONS)
    integration.disable(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(forward(compiled, inputs), dense)


@pytest.mark.parametrize("wrapped", [(), (0,), (0, 1)])
@pytest.mark.parametrize("mask_every", [1, 2])
def test_processors_that_were_kept_or_wrapped_are_the_models_after_disable(mask_every, wrapped):
    model, inputs = wan()
    dense = forward(model, inputs)
    integration.enable(model, sparse, mask_every=mask_every, **OPTIONS)
    for i in wrapped:
        model.blocks[i].attn1.processor = Wrapper(model.blocks[i].attn1.processor)
    kept = model.attn_processors
    assert not torch.allclose(forward(model, inputs), dense)
    assert integration.statistics(model).calls == 2
    integration.disable(model)
    assert wan_module.dispatch_attention_fn is ORIGINAL
    assert torch.equal(forward(model, inputs), dense)
    model.set_attn_processor(kept)
    assert torch.equal(forward(model, inputs), dense)
    with pytest.raises(InputError, match="isn't enabled"):
        integration.disable(model)


def test_other_processors_leave_nothing_behind():
    model, inputs = wan()
    dense = forward(model, inputs)
    integration.enable(model, sparse, mask_every=2, **OPTIONS)
    model.set_attn_processor(wan_module.WanAttnProcessor())
    with pytest.raises(InputError, match="enabled already"):
        integration.enable(model, sparse, **OPTIONS)
    integration.disable(model)
    assert torch.equal(forward(model, inputs), dense)
    assert not model._forward_pre_hooks


class SkipsAttention(torch.overrides.TorchFunctionMode):
    """As guidance by perturbed attention works, and context parallelism outside of diffusers."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = named or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            return named["value"] if named["query"].shape == named["value"].shape else 0
        return function(*arguments, **named)


def test_who_replaces_attention_is_refused():
    model, inputs = wan()
    integration.enable(model, full, **OPTIONS)
    dense = forward(wan()[0], inputs)
    with SkipsAttention(), pytest.raises(InputError, match="SkipsAttention is active"):
        forward(model, inputs)
    with torch.device("cpu"):  # a mode, too
        torch.testing.assert_close(forward(model, inputs), dense)


class Twice:
    """Attends twice, as differential attention does."""

    _attention_backend = _parallel_config = None

    def __call__(self, attn, hidden_states, *_):
        q, k, v = (to(hidden_states) for to in (attn.to_q, attn.to_k, attn.to_v))
        q, k, v = (t.unflatten(2, (attn.heads, -1)) for t in (q, k, v))
        one, two = (wan_module.dispatch_attention_fn(t, k, v) for t in (q, -q))
        return attn.to_out[0]((one - two).flatten(2, 3))


def test_a_layer_that_attends_twice_has_two_masks():
    model, inputs = wan()
    for block in model.blocks:
        block.attn1.processor = Twice()
    dense, made = forward(model, inputs), []
    integration.enable(model, lambda q, k: made.append(q) or full(q, k), **OPTIONS)
    torch.testing.assert_close(forward(model, inputs), dense)
    assert len(made) == 4
    integration.disable(model)
    integration.enable(model, full, mask_every=2, **OPTIONS)
    with pytest.raises(InputError, match="attends twice in one call"):
        forward(model, inputs)


@pytest.mark.parametrize("before", [False, True])
def test_under_compile_masks_are_kept_and_a_copy_of_the_code_follows(before):
    torch._dynamo.reset()
    model, inputs = wan()
    dense, compiled, made = forward(model, inputs), torch.compile(model, backend="eager"), []

    def counted(q, k):
        made.append(q)
        return sparse(q, k)

    if before:
        torch.testing.assert_close(forward(compiled, inputs), dense)
    integration.enable(model, sparse, **OPTIONS)
    wanted = forward(model, inputs)
    integration.disable(model)
    integration.enable(model, counted, mask_every=2, **OPTIONS)
    for time in (9, 8, 7, 6):
        timestep = torch.full_like(inputs["timestep"], time)
        forward(compiled, {**inputs, "timestep": timestep})
    assert len(made) == 4  # two layers, twice
    integration.disable(model)
    integration.enable(model, sparse, **OPTIONS)
    torch.testing.assert_close(forward(compiled, inputs), wanted)
    integration.disable(model)
    torch.testing.assert_close(forward(compiled, inputs), dense)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("make", [wan, ltx, hunyuan, hunyuan15])
def test_autocast_casts_as_dense_attention_does(make):
    model, inputs = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dense = forward(model, inputs)
        integration.enable(model, full, **OPTIONS)
        torch.testing.assert_close(forward(model, inputs), dense, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.needs_qk])
def test_a_named_method_brings_its_block(method):
    model, inputs = wan()
    dense = forward(model, inputs)
    integration.enable(model, method, **CPU)
    torch.testing.assert_close(forward(model, inputs), dense)  # 60 tokens: one block


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_kept_mask_hides_no_nan(which, kv_heads):
    """The mask of an earlier step skips blocks; dense attention would meet every key."""
    model, _ = wan()
    p = params.Exact(mass=0.3, block=8)
    integration.enable(model, "exact", params=p, mask_every=2, policy="lockstep", **CPU)
    site = next(integration.sites_of(model, integration.Site))
    for step in range(2):
        here = site.progress._here()
        here.place, here._thread = Place(0, step, 0, 0), threading.get_ident()
        q, k, v = (3 * torch.randn(2, 60, n, 12) for n in (2, kv_heads, kv_heads))
        if step:
            (q, k, v)[which][1, 33, 0, 3] = float("nan")
        out = site.attend(q, k, v, Lengths((60, 60), 60))
    k, v = (x.repeat_interleave(2 // kv_heads, 2).transpose(1, 2) for x in (k, v))
    dense = (torch.softmax(q.transpose(1, 2) @ k.mT / 12**0.5, -1) @ v).transpose(1, 2)
    assert out[dense.isnan()].isnan().all()
    assert dense[1].isnan().any()
    assert out[0].isfinite().all()
    if which == 0:
        assert torch.equal(out.isnan(), dense.isnan())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("window", {}, "window doesn't look at Q and K"),
        ("radial", {}, "radial doesn't look at Q and K"),
        ("exact", {"params": params.XAttention()}, "exact takes Exact, not XAttention"),
        ("exact", {"params": {"mass": 0.9}}, "exact takes Exact, not dict"),
        ("spargeattn", {"block": (128, 128)}, "spargeattn makes blocks of 128x64"),
        ("exact", {"block": 128}, r"block=128; expected two sizes"),
        (full, {"block": 128}, r"block=128; expected two sizes"),
        (full, {"block": (16, 0)}, r"block=\(16, 0\); expected two sizes"),
        (full, {"block": (16.0, 8)}, "expected two sizes"),
        (full, {"block": (True, 8)}, "expected two sizes"),
        (full, {"params": params.Exact()}, "params are those of a named method"),
        (params.Exact(), {}, r"method is Exact\(.*; expected a name, or a function"),
        (params.Exact, {}, "method is <class .*; expected a name, or a function"),
        (full, {"mask_every": 2.0}, r"mask_every: 2\.0; expected a whole number"),
        (full, {"mask_every": "2"}, "mask_every: '2'"),
        (full, {"min_tokens": None}, "min_tokens: None"),
        (full, {"reuse": 5}, "reuse=5; expected a wavealign.Reuse"),
        (full, {"policy": None}, "policy: None; expected text"),
        (full, {"profile": 3}, "unknown device '3'"),
        (None, {}, "method is None; expected a name"),
        (torch.ones(2, 4, 8), {}, "method is tensor"),
        (lambda q: q, {}, "can't be called with Q and K .*too many"),
        (lambda q, k, v: q, {}, "can't be called with Q and K .*'v'"),
    ],
)
def test_what_enable_refuses(method, options, message):
    model, _ = wan()
    with pytest.raises(InputError, match=message):
        integration.enable(model, method, **{**CPU, **options})
    assert "wavealign" not in type(model.blocks[0].attn1.processor).__module__
    assert sys.modules[type(model).__module__].dispatch_attention_fn is ORIGINAL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "5"}, "steps: '5'; expected a whole number"),
        ({"stepss": 5}, "unknown option 'stepss'. Did you mean 'steps'"),
        ({"rule": None}, "unknown option 'rule'"),
        ({"min_tokens": "3"}, "min_tokens: '3'"),
        ({"check_finite": "no"}, "check_finite: 'no'; expected True or False"),
        ({"reduced": 0}, "reduced: 0; expected True or False"),
        ({"full_attention": 3}, "full_attention=3; expected a function"),
        ({"seed": 1.5}, "seed: 1.5"),
    ],
)
def test_what_enable_session_refuses(options, message):
    from wavealign.integrations.diffusers_sessions import enable_session

    model, _ = wan()
    with pytest.raises(InputError, match=message):
        enable_session(model, "gsrs", **{**CPU, **options})
    assert "wavealign" not in type(model.blocks[0].attn1.processor).__module__
