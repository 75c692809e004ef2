"""The stress test's calls of `Attention`, `attend` with a plan, and sessions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from unittest import mock

import torch
from attention_cases import inputs

import wavealign
from wavealign.attention.plans import Buffers
from wavealign.guard.decide import Guard
from wavealign.masks import BlockMask
from wavealign.planning.masks import mask_from_packed
from wavealign.qk import TokenGrid, token_order
from wavealign.qk.orders import invert
from wavealign.sessions import make_session

POLICIES = ("lockstep", "nnz", "svd+nnz/shuffled+sawtooth", "resync", "original", "svd")
MASKS = 4
LAYOUTS = ("bhsd", "bshd")
AGAIN = ("failed", "interrupted")


def textbook(q, k, v, mask, block):
    """Output and log-sum-exp of ``[B, H, S, D]`` by the definition, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1).double() for t in (k, v))
    kept = mask.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    kept = kept[..., : q.shape[2], : k.shape[2]]
    scores = (q.double() @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~kept, -math.inf)
    out = torch.nan_to_num(scores.softmax(-1), 0.0) @ v
    return out.to(q.dtype), scores.logsumexp(-1).float()


# --- Attention and plans ---------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A backend and what it is tried with: heads of D elements, blocks, and lengths of Q and K.

    Attributes:
        close: how far an output may be off.
    """

    name: str
    dtype: torch.dtype
    head_dim: int
    blocks: tuple[tuple[int, int], ...]
    tokens: tuple[tuple[int, int], ...]
    close: float


REFERENCE = Kernel(
    "reference", torch.float32, 16, ((16, 8), (8, 16)), ((75, 61), (40, 96), (64, 64)), 2e-5
)
TRITON = Kernel(
    "triton", torch.bfloat16, 64, ((128, 128), (128, 64)), ((700, 500), (384, 896), (512, 512)),
    3e-2,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Problem:
    """Q, K and V with some masks of one size, and what attention has to give."""

    qkv: tuple[torch.Tensor, ...]
    block: tuple[int, int]
    masks: list[torch.Tensor]
    wanted: list[tuple[torch.Tensor, torch.Tensor]]
    close: float

    def check(self, m, layout, lse, out):
        """Of an output under mask m, perhaps with its log-sum-exp."""
        made, made_lse = out if lse else (out, None)
        made = made if layout == "bhsd" else made.transpose(1, 2)
        torch.testing.assert_close(made, self.wanted[m][0], atol=self.close, rtol=self.close)
        if lse:
            torch.testing.assert_close(made_lse, self.wanted[m][1], atol=self.close, rtol=1e-3)

    def given(self, layout):
        """Q, K and V as a caller with this layout has them."""
        return self.qkv if layout == "bhsd" else tuple(t.transpose(1, 2) for t in self.qkv)


def problems(kernel, device, seed):
    """Of more shapes than an `Attention` remembers: lengths, sequences, GQA, a mask for each."""
    found = []
    for i, (tokens, B, kv_heads) in enumerate(itertools.product(kernel.tokens, (1, 2), (4, 2))):
        q, k, v = inputs(B, 4, tokens, kernel.head_dim, kv_heads, seed + i, kernel.dtype)
        qkv = tuple(t.to(device) for t in (3 * q, k, v))  # rows look at few keys each
        draw = torch.Generator().manual_seed(seed + i)
        for block in kernel.blocks:
            M, N = (-(-length // size) for length, size in zip(tokens, block, strict=True))
            shape = (B, 4, M, N) if B > 1 and i % 3 else (4, M, N)
            shares = torch.linspace(0.25, 0.7, MASKS)
            masks = [(torch.rand(shape, generator=draw) < share).to(device) for share in shares]
            wanted = [textbook(*qkv, mask, block) for mask in masks]
            found.append(Problem(qkv, block, masks, wanted, kernel.close))
    return found


REWRITES = {
    "seen": lambda mask, other: mask.copy_(other),
    "data": lambda mask, other: mask.data.copy_(other),
    "dlpack": lambda mask, other: torch.from_dlpack(mask.view(torch.uint8)).copy_(other),
    "numpy": lambda mask, other: mask.numpy().__setitem__(..., other.numpy()),
}


class Sites:
    """`Attention` objects that all threads share, some of them one set of buffers, and plans."""

    @classmethod
    def on(cls, device, seed):
        """One for each kernel that is tried there."""
        kernels = (REFERENCE,) if device == "cpu" else (REFERENCE, TRITON)
        return [cls(kernel, device, seed) for kernel in kernels]

    def __init__(self, kernel, device, seed):
        self._kernel, self._ways = kernel, [w for w in REWRITES if device == "cpu" or w != "numpy"]
        made = problems(kernel, device, seed)
        self._problems = {block: [p for p in made if p.block == block] for block in kernel.blocks}
        buffers, reuses = Buffers(), (wavealign.Reuse(calls=3), wavealign.Reuse(min_overlap=1.0))
        wanted = [*(("auto", reuse) for reuse in reuses), *((p, None) for p in POLICIES)]
        self._sites = []
        for i, (policy, reuse) in enumerate(wanted):
            layout, block = LAYOUTS[i % 2], kernel.blocks[i // 2 % 2]
            site = wavealign.Attention(
                "h200", reuse, policy=policy, backend=kernel.name, layout=layout, block=block,
                buffers=buffers if i < 5 else None,
            )  # fmt: skip
            self._sites.append((site, layout, block))
        planned = itertools.product(self._problems[kernel.blocks[0]][:6], range(2))
        self._plans = [
            (p, m, self._plan(p, m, POLICIES[i % len(POLICIES)]))
            for i, (p, m) in enumerate(planned)
        ]

    def offers(self):
        """What a worker may do, and how often."""
        return [(self.call_sites, 12), (self.call_plans, 6)]

    def close(self):
        """Nothing is left of threads that ended."""
        assert [site._lanes.values() for site, _, _ in self._sites] == [[]] * len(self._sites)

    def _plan(self, p, m, policy):
        q, k, _ = p.qkv
        return wavealign.plan(
            p.masks[m], policy, "h200", block=p.block, tokens=(q.shape[2], k.shape[2]),
            backend=self._kernel.name, head_dim=q.shape[3],
        )  # fmt: skip

    def call_sites(self, worker):
        """A few calls of one site with one tensor, whose content changes by every road."""
        site, layout, block = worker.random.choice(self._sites)
        p = worker.random.choice(self._problems[block])
        m, mask = 0, p.masks[0].clone()
        same = False  # whether the caller knows that nothing has written to the mask since
        for _ in range(worker.random.randint(2, 8)):
            if worker.chance(0.6):
                m = worker.random.randrange(MASKS)
                REWRITES[worker.random.choice(self._ways)](mask, p.masks[m])
                same = False
            if worker.chance(0.15):
                self._call_with_others(worker, site, p, layout)
            if worker.chance(0.15):
                same = self._call_wrongly(worker, site, p.given(layout), mask) or same
            lse = worker.chance(0.3)
            call = functools.partial(
                site, *p.given(layout), mask, return_lse=lse, same_mask=same and worker.chance(0.8)
            )
            told = worker.call("Attention", call, functools.partial(p.check, m, layout, lse))
            same = told != "interrupted"  # perhaps before it had begun

    def _call_with_others(self, worker, site, p, layout):
        """With a mask that other threads use at the same time, or one on the host."""
        m = worker.random.randrange(MASKS)
        mask = p.masks[m]
        if mask.ndim == 3 and worker.chance(0.3):
            tokens = tuple(t.shape[2] for t in p.qkv[:2])
            mask = BlockMask.from_dense(mask.cpu().numpy(), p.block, tokens)
        call = functools.partial(site, *p.given(layout), mask, same_mask=worker.chance(0.5))
        worker.call("Attention", call, functools.partial(p.check, m, layout, False))

    def _call_wrongly(self, worker, site, qkv, mask):
        """With a mask or a q that doesn't fit; whether that was the mask's last call."""
        q, k, v = qkv
        wrong, right_mask = mask[..., :-1].contiguous(), worker.chance(0.5)
        call = functools.partial(site, *((q[0], k, v, mask) if right_mask else (*qkv, wrong)))
        told = worker.call("Attention", call, refused, (r"make \d+ blocks, the mask has", "q is"))
        return right_mask and told == "refused"

    def call_plans(self, worker):
        """A plan that all threads share, and calls that plan for themselves."""
        p, m, plan = worker.random.choice(self._plans)
        layout, policy = worker.random.choice(LAYOUTS), worker.random.choice(("auto", *POLICIES))
        attend = functools.partial(
            wavealign.attend, *p.given(layout), backend=self._kernel.name, layout=layout,
            return_lse=True,
        )  # fmt: skip
        calls = [
            lambda: attend(plan=plan),
            lambda: attend(plan=self._plan(p, m, policy)),
            lambda: attend(p.masks[m], block=p.block, policy=policy, device_profile="h200"),
        ]
        for call in (calls[0], worker.random.choice(calls)):
            worker.call("plan", call, functools.partial(p.check, m, layout, True))


def refused(_):
    """A check of what should have been refused."""
    raise AssertionError("an output where a refusal was expected")


@contextlib.contextmanager
def deciding_guard():
    """A guard that looks at every launch, however short, and gives each head another policy."""
    decide, turns = Guard.decide, itertools.count()

    def mixed(*arguments, **named):
        decision, turn = decide(*arguments, **named), next(turns)
        heads = []
        for h in decision.heads:
            policy = POLICIES[(turn + h.head) % len(POLICIES)]
            heads.append(
                dataclasses.replace(h, chosen=dataclasses.replace(h.chosen, policy=policy))
            )
        return dataclasses.replace(decision, heads=tuple(heads))

    with (
        mock.patch.object(Guard, "decide", mixed),
        mock.patch.object(Guard, "looks", return_value=True),
        mock.patch.object(Guard, "looks_closely", return_value=True),
    ):
        yield


# --- sessions --------------------------------------------------------------------------------

GRID, STEPS, BRANCHES = TokenGrid(2, 4, 6), 6, ("cond", "uncond")
SEARCH = {"search_steps": (1, 3), "steps": STEPS}
SESSIONS = {
    "gsrs": {**SEARCH, "p": (0.8, 0.6), "grid": GRID, "policy": "auto"},
    "gsrs, not reduced": {**SEARCH, "p": (0.8, 0.6), "reduced": False, "text_tokens": 5},
    "topk": {**SEARCH, "keep": 0.4, "grid": GRID, "order": "raster", "policy": "auto"},
    "adaspa": {**SEARCH, "sparsity": 0.6, "grid": GRID, "text_tokens": 5},
    "liteattention": {"threshold": -4.0, "steps": STEPS, "warmup": 1, "grid": GRID},
}
SESSION_BLOCK = (8, 6)
SESSION_CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def new_session(name):
    """Before its first step."""
    options = {"policy": "resync", "block": SESSION_BLOCK, "profile": "h200", **SESSIONS[name]}
    return make_session(name.partition(",")[0], backend="reference", **options)


class Run:
    """A session's run of one request: two branches, and what each step has to give.

    Masks are those of an undisturbed session, which tests/sessions holds against slow ones from the
    definitions; attention over them is the textbook's.
    """

    def __init__(self, name, seed, device):
        session, options = new_session(name), SESSIONS[name]
        order = torch.arange(GRID.tokens + options.get("text_tokens", 0))
        if session.token_order != "raster":
            video = torch.from_numpy(token_order(session.token_order, GRID).astype("int64"))
            order = torch.cat([video, order[len(video) :]])
        back = torch.from_numpy(invert(order.numpy()))
        self.inputs, self.wanted = {}, {}
        for i, branch in enumerate(BRANCHES):
            draw = torch.Generator().manual_seed(seed + 50 * i)
            drawn = torch.randn(2, 3, 1, len(order), 2, 16, generator=draw).to(device)
            for step in range(STEPS):  # they drift, so that blocks come and go
                q, k, v = math.cos(0.35 * step) * drawn[0] + math.sin(0.35 * step) * drawn[1]
                qkv = self.inputs[branch, step] = 2.5 * q, k, v
                among = _attended(session, branch, step, device)
                session.attend(step, 0, *qkv, branch)
                moved = (t[:, order].transpose(1, 2) for t in qkv)
                made = textbook(*moved, among, SESSION_BLOCK)[0]
                self.wanted[branch, step] = made.transpose(1, 2)[:, back]


def _attended(session, branch, step, device):
    """The blocks that a step attends to, before it."""
    state, action = session._states.get((0, branch)), session.rule.action(step)
    if state is None or state.keep is None:
        return torch.ones(1, 1, 99, 99, dtype=torch.bool, device=device)
    if action == "reuse" or session.rule.name == "liteattention":
        return session.mask(0, branch)
    if state.memory.candidates is None:
        return torch.ones(1, 1, 99, 99, dtype=torch.bool, device=device)
    return mask_from_packed(state.memory.candidates, state.prepared.sizes.N)


class Sessions:
    """Sessions of a thread's own, and some that all share, which is refused where it would show."""

    def __init__(self, seed, device):
        self._runs = {name: [Run(name, seed + r, device) for r in range(3)] for name in SESSIONS}
        self._shared = {name: new_session(name) for name in SESSIONS}

    def offers(self):
        """What a worker may do, and how often."""
        return [(self.call_own, 2), (self.call_shared, 2)]

    def close(self):
        """Sessions go with their threads, or stay."""

    def call_own(self, worker):
        """A run or two of a session that nobody else has."""
        name = worker.random.choice(list(SESSIONS))
        session = new_session(name)
        for _ in range(2):
            self._run(worker, name, session, f"session, {name}", ("was done already",))
            session.reset()

    def call_shared(self, worker):
        """A run of a session that others may be in the middle of."""
        name = worker.random.choice(list(SESSIONS))
        session = self._shared[name]
        if worker.chance(0.7):
            session.reset()
        refusals = ("was done already", "skips step", "another thread")
        self._run(worker, name, session, "shared session", refusals)

    def _run(self, worker, name, session, sort, refusals):
        run = worker.random.choice(self._runs[name])
        for step, branch in itertools.product(range(STEPS), BRANCHES):
            wanted = run.wanted[branch, step]
            call = functools.partial(session.attend, step, 0, *run.inputs[branch, step], branch)
            check = functools.partial(torch.testing.assert_close, expected=wanted, **SESSION_CLOSE)
            told = "failed"
            while told in AGAIN:
                told = worker.call(sort, call, check, refusals)
            if told != "right" or worker.chance(0.03) or worker.done:
                return
