"""The stress test's calls of diffusers transformers: enabled, under sessions, enabled meanwhile.

What they have to give comes from the models' own code, with attention by its definition in the
place of diffusers' operation, before anything is enabled.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
import threading
import zlib
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import session_oracles as oracle
import torch
from attention_cases import BLOCK
from stress_attention import AGAIN, textbook
from tiny_transformers import forward, hunyuan, hunyuan15, text_mask, wan

from wavealign.integrations import diffusers as integration
from wavealign.integrations import diffusers_sessions
from wavealign.integrations.capture import self_attentions
from wavealign.integrations.models import token_grid
from wavealign.qk import token_order

TIMES, REQUESTS, BRANCHES = (900, 700, 500, 300), 3, 2
SEARCH, SHARES = (0, 2), (0.7, 0.5)
ENABLED = {"block": BLOCK, "profile": "h200", "backend": "reference"}
SESSION = {"steps": len(TIMES), "search_steps": SEARCH, "p": SHARES, "policy": "resync", **ENABLED}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
CLOSED = (r"call \d+ of the transformer", "again with the same text", "goes on with the run before")
LOST = (
    "another thread", "another run has begun", "was broken off", "was done already", "skips step",
    "expected the same to the end of the run", *CLOSED,
)  # fmt: skip


class _Here(threading.local):
    """Where a thread's call is: what masks depend on."""

    place: tuple[Any, ...] = ()
    layer: int | None = None


here = _Here()


def own_masks(q, k):
    """The mask of the place at hand, whatever Q and K hold."""
    shape = (q.shape[2], -(-q.shape[1] // BLOCK[0]), -(-k.shape[1] // BLOCK[1]))
    seed = zlib.crc32(repr((here.place, here.layer, q.shape[1])).encode())
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (drawn < 0.4).to(q.device)


def masked(q, k, v):
    """Attention of ``[B, S, H, D]`` by `own_masks`."""
    swapped = (t.transpose(1, 2) for t in (q, k, v))
    return textbook(*swapped, own_masks(q, k), BLOCK)[0].transpose(1, 2)


def dense(q, k, v):
    """Attention over everything."""
    swapped = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2)


class SlowGsrs:
    """GSRS from its definition, for each place that calls; one sequence at a time."""

    def __init__(self, grid):
        self._order, self._keep = token_order("hilbert", grid), {}

    def __call__(self, q, k, v):
        _, request, step, branch = here.place
        order = np.concatenate([self._order, np.arange(len(self._order), q.shape[1])])
        out = torch.zeros_like(q)
        for h in range(q.shape[2]):
            qkv = [t[0, order, h].cpu().numpy() for t in (q, k, v)]
            made = self._head((request, branch, here.layer, h), step, *qkv)
            out[0, order, h] = torch.from_numpy(made).to(q)
        return out

    def _head(self, key, step, q, k, v):
        M, N = (-(-len(q) // size) for size in BLOCK)
        first, keep = self._keep[key] if step else (None, None)
        if step not in SEARCH:
            return oracle.attend(q, k, v, keep, BLOCK)[0]
        among = np.ones((M, N), bool) if first is None else first
        out, lse = oracle.attend(q, k, v, among, BLOCK)
        weights, share = oracle.weights(q, k, among, BLOCK, lse), SHARES[SEARCH.index(step)]
        keep = np.stack([oracle.top_p(weights[u], share, among[u]) for u in range(M)])
        self._keep[key] = (keep if first is None else first), keep
        return out


@dataclass
class Shared:
    """Transformers of one run, which all threads call, and what its steps have to give.

    Attributes:
        name: for the tally.
        models: of each step; Wan 2.2 has two in turn.
        inputs: of a request, step and branch.
        every: steps that share a mask. It may be younger than its share: that a run was broken off
            in its first step is only seen in the second call of the next one's.
        wanted: outputs of a request, step and branch, one for each age that the mask may have.
        turn: of those who wait until nobody else calls.
    """

    name: str
    models: list[torch.nn.Module]
    inputs: dict[tuple[int, int, int], dict[str, Any]]
    every: int = 1
    wanted: dict[tuple[int, int, int], list[torch.Tensor]] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def make(cls, name, made, seed, *, every=1, per_token=False):
        """Of tiny models and inputs of theirs; all requests have one negative prompt.

        Args:
            name: see `Shared`.
            made: a model each, with its inputs.
            seed: of the requests.
            every: see `Shared`.
            per_token: timesteps of tokens, 0 in the first frame.
        """
        draw = torch.Generator().manual_seed(seed)
        for number, (model, _) in enumerate(made):
            enliven(model, number)
        model, given = made[0]

        def drawn(name):
            return torch.randn(given[name].shape, generator=draw).to(given[name].device)

        texts, inputs = [drawn("encoder_hidden_states") for _ in range(REQUESTS + 1)], {}
        for request, step in itertools.product(range(REQUESTS), range(len(TIMES))):
            latents, time = drawn("hidden_states"), torch.full_like(given["timestep"], TIMES[step])
            time = _of_tokens(time, latents, model) if per_token else time
            for branch in range(BRANCHES):
                text = texts[-1 if branch else request]
                one = {"hidden_states": latents, "timestep": time, "encoder_hidden_states": text}
                if "encoder_attention_mask" in given:
                    B, most = given["encoder_attention_mask"].shape
                    lengths = [2 + (request + 2 * branch + b) % (most - 2) for b in range(B)]
                    one["encoder_attention_mask"] = text_mask(lengths, most).to(text.device)
                inputs[request, step, branch] = {**given, **one}
        each = len(TIMES) // len(made)
        return cls(name, [model for model, _ in made for _ in range(each)], inputs, every)

    def precompute(self, attention):
        """Let the models attend so, and keep what every call has to give."""
        module = importlib.import_module(type(self.models[0]).__module__)
        original = module.dispatch_attention_fn

        def dispatch(query, key, value, attn_mask=None, **named):
            if here.layer is None:
                return original(query, key, value, attn_mask=attn_mask, **named)
            return _in_front_of_padding(query, key, value, attn_mask, attention)

        with mock.patch.object(module, "dispatch_attention_fn", dispatch):
            for (request, step, branch), given in self.inputs.items():
                model, outs = self.models[step], []
                for age in range(min(self.every, step - self.models.index(model) + 1)):
                    here.place = self.name, request, step - age, branch
                    outs.append(forward(model, given))
                self.wanted[request, step, branch] = outs
        return self

    def call(self, worker, key, refusals):
        """One call of a worker."""
        here.place = self.name, *key

        def function():
            with torch.inference_mode(worker.chance(0.3)):
                return forward(self.models[key[1]], self.inputs[key])

        return worker.call(self.name, function, one_of(self.wanted[key]), refusals)


def one_of(wanted):
    """A check of an output that may be any of these."""

    def check(out):
        if not any(torch.allclose(out, each, **CLOSE) for each in wanted):
            torch.testing.assert_close(out, wanted[0], **CLOSE)

    return check


def enliven(model, seed):
    """Give a model weights that make attention choose and matter, and let `here` know its layer."""
    draw = torch.Generator().manual_seed(seed)

    def enter(i, *_):
        here.layer = i

    def leave(*_):
        here.layer = None

    for i, module in enumerate(self_attentions(model)):
        for name, weight in module.named_parameters():
            if weight.ndim == 2:
                scale = (2.0 if "_q" in name or "_k" in name else 1.0) / weight.shape[1] ** 0.5
                weight.data.copy_(scale * torch.randn(weight.shape, generator=draw))
        module.register_forward_pre_hook(functools.partial(enter, i))
        module.register_forward_hook(leave)


def _of_tokens(time, latents, model):
    """Timesteps of Wan 2.2's tokens: those of the first frame are given."""
    sizes = [n // p for n, p in zip(latents.shape[2:], model.config.patch_size, strict=True)]
    times = time[:, None].repeat(1, int(np.prod(sizes)))
    times[:, : sizes[1] * sizes[2]] = 0
    return times


def _in_front_of_padding(q, k, v, attn_mask, attention):
    """Attention of ``[B, S, H, D]``, sequence by sequence where their lengths differ."""
    B, S = q.shape[:2]
    lengths = [S] * B
    if attn_mask is not None:
        lengths = attn_mask.reshape(B, -1, S)[:, 0].sum(-1).tolist()
    parts = [(slice(b, b + 1), length) for b, length in enumerate(lengths)]
    out = torch.zeros_like(q)
    for own, length in parts if len(set(lengths)) > 1 else [(slice(None), lengths[0])]:
        out[own, :length] = attention(*(t[own, :length] for t in (q, k, v)))
    return out


class Transformers:
    """Four that are enabled, two under sessions, and one that is copied."""

    def __init__(self, seed, device):
        def built(build, alone=True):
            model, given = build()
            B = len(given["hidden_states"])
            return model.to(device), {
                name: (t[:1] if alone and len(t) == B else t).to(device)
                for name, t in given.items()
            }

        make = Shared.make
        self._enabled = [
            make("Wan 2.1", [built(wan)], seed),
            make("Wan 2.2", [built(wan), built(wan)], seed + 1, every=2, per_token=True),
            make("HunyuanVideo", [built(hunyuan, False)], seed + 2),
            make("HunyuanVideo 1.5", [built(hunyuan15, False)], seed + 3, every=2),
        ]
        one = self._enabled[0]
        plain = copy.deepcopy(one.models[0])
        self._plain = Shared("Wan 2.1, own", [plain] * len(TIMES), one.inputs).precompute(dense)
        policies = ("lockstep", "auto", "svd+nnz/shuffled+sawtooth", "resync")
        for shared, policy in zip(self._enabled, policies, strict=True):
            shared.precompute(masked)
            for model in dict.fromkeys(shared.models):
                integration.enable(
                    model, own_masks, policy=policy, mask_every=shared.every, **ENABLED
                )
        self._sessions = [
            make("Wan session", [built(wan)], seed + 4),
            make("HunyuanVideo session", [built(hunyuan)], seed + 5),
        ]
        for shared in self._sessions:
            model, given = shared.models[0], shared.inputs[0, 0, 0]
            shared.precompute(SlowGsrs(token_grid(model, given)))
            diffusers_sessions.enable_session(model, "gsrs", **SESSION)

    def offers(self):
        """What a worker may do, and how often."""
        return [(self.call_enabled, 10), (self.call_session, 5), (self.call_own, 2)]

    def close(self):
        """Nothing is left of threads that ended, and modules have their own operations back."""
        for shared in self._enabled:
            for model in shared.models:
                for site in integration.sites_of(model, integration.Site):
                    assert site.kept.values() == site.attention._lanes.values() == []
        for shared in (*self._enabled, *self._sessions):
            for model in dict.fromkeys(shared.models):
                integration.disable(model)
                module = importlib.import_module(type(model).__module__)
        assert not hasattr(module.dispatch_attention_fn, "_wavealign")

    def call_enabled(self, worker):
        """A run, perhaps broken off."""
        self._run(worker, worker.random.choice(self._enabled), CLOSED)

    def call_session(self, worker):
        """A run of a session that others may want at the same time; most wait for their turn."""
        shared = worker.random.choice(self._sessions)
        with shared.turn if worker.chance(0.8) else contextlib.nullcontext():
            if worker.chance(0.5):
                diffusers_sessions.restart(shared.models[0])
            self._run(worker, shared, LOST)

    def _run(self, worker, shared, refusals):
        request = worker.random.randrange(REQUESTS)
        for step, branch in itertools.product(range(len(TIMES)), range(BRANCHES)):
            told = shared.call(worker, (request, step, branch), refusals)
            while told in AGAIN and worker.chance(0.6):
                told = shared.call(worker, (request, step, branch), refusals)
            if told != "right" or worker.chance(0.03) or worker.done:
                return

    def call_own(self, worker):
        """A model of its own, enabled and disabled while others run: whole, or not at all."""
        model, name, key = copy.deepcopy(self._plain.models[0]), self._plain.name, (0, 0, 0)
        (enabled,), (plain,) = (shared.wanted[key] for shared in (self._enabled[0], self._plain))
        given, here.place = self._plain.inputs[key], (self._enabled[0].name, *key)
        enable = functools.partial(integration.enable, model, own_masks, policy="nnz", **ENABLED)
        disable = functools.partial(integration.disable, model)
        for change, before, after, done in (
            (enable, plain, enabled, "enabled already"), (disable, enabled, plain, "isn't enabled"),
        ):  # fmt: skip
            told = "failed"
            while told in AGAIN:
                told = worker.call(name, change, lambda _: None, (done,))
                # Ctrl-C may come when all is done.
                either = [after, before] if told in AGAIN else [after]
                worker.call(name, functools.partial(forward, model, given), one_of(either))
