"""What a processor of the model asks of attention is done exactly, or refused; never left aside."""

import contextlib
import copy
import gc
import itertools
import sys

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
pytest.importorskip("diffusers")

import diffusers.models.transformers.transformer_wan as wan_module  # noqa: E402
from faults import Fault, Interrupt  # noqa: E402
from tiny_transformers import forward, hunyuan, hunyuan15, ltx, wan  # noqa: E402

from wavealign.errors import InputError  # noqa: E402
from wavealign.integrations import diffusers as integration  # noqa: E402
from wavealign.integrations.capture import Wanted, capture_qk  # noqa: E402
from wavealign.methods import METHODS, params  # noqa: E402

OPTIONS = {"block": (16, 8), "profile": "h200", "backend": "reference", "policy": "lockstep"}
ORIGINAL = wan_module.dispatch_attention_fn


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
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


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("make", [wan, ltx, hunyuan, hunyuan15])
def test_context_parallelism_is_refused_in_either_order(make, wrapped):
    class Wrapper:
        _attention_backend = _parallel_config = None

        def __init__(self, inner):
            self.inner = inner

        def __call__(self, *arguments, **named):
            return self.inner(*arguments, **named)

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
    integration.enable(model, method, profile="h200", backend="reference")
    torch.testing.assert_close(forward(model, inputs), dense)  # 60 tokens: one block


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
    ],
)
def test_what_enable_refuses(method, options, message):
    model, _ = wan()
    with pytest.raises(InputError, match=message):
        integration.enable(model, method, profile="h200", backend="reference", **options)
    assert "wavealign" not in type(model.blocks[0].attn1.processor).__module__
    assert sys.modules[type(model).__module__].dispatch_attention_fn is ORIGINAL
