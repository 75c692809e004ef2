"""`Session`: a sparse method under all layers of a model, from the first step to the last.

For each layer and branch (conditional, unconditional) on its own: full attention up to the first
search; at a search, attention that also weighs blocks, a new mask, and one schedule planned for
it; until the next search, block-sparse attention by that schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable

import torch

from wavealign._devices import on_device
from wavealign._locks import ForkSafeLock
from wavealign.attention.call import attend as attend_by_plan
from wavealign.attention.dense import attend_dense
from wavealign.attention.inputs import Sequences, mask_sizes
from wavealign.attention.lanes import capturing, make_room
from wavealign.attention.plans import prepare
from wavealign.attention.terms import Terms
from wavealign.errors import InputError, unknown_name
from wavealign.numbers import block_size, flag, whole_number, whole_numbers
from wavealign.planning.masks import mask_from_packed
from wavealign.qk.grid import TokenGrid
from wavealign.sessions.layer_state import LayerState, Signature, check_step, told
from wavealign.sessions.plans import SEARCH_LOOK_FRAC, Planners, pack
from wavealign.sessions.rule import Found, Rule, StepCall, spread_nan
from wavealign.sessions.statistics import Statistics, Tally
from wavealign.sessions.tokens import TokenOrder
from wavealign.sim.power import REGIMES

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FullAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_storing = ForkSafeLock()  # what sessions know of layers

_MOST_TEXTS = 16  # lengths of text whose token orders are remembered; the oldest goes


class Session:
    """A method's run, called for every layer at every step.

    A call that raises leaves the session as it was: the same call can be made again with other
    inputs, or `reset` begins anew. Calls come one at a time, on one stream: layers share the
    buffers that plans are made in. A thread in whose run another thread calls or resets is refused.

    Memory for each layer and branch, in a batch of B and lists up to w blocks: ``4·B·H·M·(w + 4)``
    bytes for the schedule, ``B·H·M·N / 8`` for each of the mask and the candidates, and ``4·B·H·L``
    where the rule keeps a log-sum-exp. It goes with `reset`. What runs have in common, lists that
    plans are made in (``4·B·H·M·(N + 5)`` bytes) and the order of tokens (``16·L``), is kept for
    the last 16 lengths of the sequence and of the text.
    """

    def __init__(
        self, rule: Rule, *, block: tuple[int, int] = (128, 128),
        grid: TokenGrid | tuple[int, int, int] | None = None, order: str | None = None,
        text_tokens: int = 0, policy: str = "auto", profile: str | None = None,
        backend: str = "auto", objective: str = "time", regime: str = "steady", seed: int = 0,
        check_finite: bool = True, full_attention: FullAttention | None = None,
    ) -> None:  # fmt: skip
        """A session before its first step.

        Args:
            rule: the method; the named sessions make it.
            block: tokens of a query and of a K/V block.
            grid: of the video tokens (frames, height, width).
            order: token order that blocks are cut in: by default the generalized Hilbert curve
                where there is a grid, else raster.
            text_tokens: behind the video, which keep their places; a call may say otherwise.
            policy: ``"auto"`` (the guard decides, once a search) or a policy's name.
            profile: device name or path; by default the GPU at hand.
            backend: see `wavealign.attend`.
            objective, regime: the guard's, see `wavealign.Attention`.
            seed: of the shuffled K/V orders.
            check_finite: refuse NaN in the scores of a search. The host waits for the answer, once
                a search, and learns the longest row; without it, such a search keeps all blocks,
                and lists are N long.
            full_attention: what computes full attention, ``[B, L, H, D]`` each; by default
                the fastest kernel at hand (`wavealign.attention.dense`).

        Raises:
            InputError: unknown names, sizes that are no whole numbers or below 1.
        """
        if grid is not None and not isinstance(grid, TokenGrid):
            sizes = whole_numbers("grid", grid)
            if len(sizes) != 3:
                raise InputError(f"grid={grid}; expected frames, height and width in tokens.")
            grid = TokenGrid(*sizes)
        if regime not in REGIMES:
            raise unknown_name("regime", regime, REGIMES)
        self.rule = rule
        self._block = block_size(block)
        self._text_tokens = whole_number("text tokens", text_tokens)
        first = TokenOrder(order, grid, self._text_tokens)
        self._orders = {self._text_tokens: first}
        self._grid, self._order_name = grid, first.name
        self._terms = Terms(policy, profile, backend, objective, seed)
        self._regime, self._check_finite = regime, flag("check_finite", check_finite)
        if full_attention is not None and not callable(full_attention):
            raise InputError(f"full_attention={full_attention!r}; expected a function of q, k, v.")
        self._full = full_attention or functools.partial(attend_dense, backend=backend)
        self._planners = Planners()
        self._states: dict[tuple[int, str], LayerState] = {}
        self._cut_off: set[int] = set()  # threads in whose run another one began its own
        self._tally = Tally()

    @property
    def statistics(self) -> Statistics:
        """What it has done since it was made or reset; waits for the device."""
        return self._tally.statistics()

    @property
    def token_order(self) -> str:
        """Name of the order that blocks are cut in."""
        return self._order_name

    def reset(self) -> None:
        """Forget everything: the next step of every layer is 0."""
        with _storing.lock:
            unfinished = [s for s in self._states.values() if s.next_step < self.rule.steps]
            self._cut_off |= {state.thread for state in unfinished}
            self._cut_off.discard(threading.get_ident())
            self._states.clear()
            self._tally = Tally()

    def mask(self, layer: int, branch: str = "cond") -> torch.Tensor:
        """The blocks in use, bool ``[B, H, M, N]`` in the session's token order.

        Raises:
            InputError: there are none yet.
        """
        state = self._states.get((layer, branch))
        if state is None or state.keep is None:
            raise InputError(f"layer {layer}, branch '{branch}': nothing was searched yet.")
        return mask_from_packed(state.keep, state.prepared.sizes.N)

    def explain(self) -> str:
        """The last plan of every layer and branch, one line a head."""
        return "\n".join(
            f"layer {layer}, {branch}, {line}"
            for (layer, branch), state in self._states.items()
            if state.plan is not None
            for line in state.plan.explain().splitlines()
        )

    @torch.compiler.disable
    def attend(
        self, step: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        branch: str = "cond", text_tokens: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Self-attention of one layer at one step.

        Args:
            step: from 0, one after the other for each layer and branch.
            layer: which.
            q, k, v: ``[B, L, H, D]`` in raster order, after rotary position, text at the end.
            branch: of the guidance; what is found for one is never used for another.
            text_tokens: of this layer and branch, at every step the same; by default the session's.

        Returns:
            ``[B, L, H, D]``, in the dtype of q (autocast has no say).

        Raises:
            InputError: a step that is called twice, skipped or beyond the run, a change of shape,
                dtype, device or text since the last step, a length that isn't the grid's, NaN in
                the scores of a search.
            MissingCapabilityError: no backend for these inputs, at the first step.
        """
        step = whole_number(f"layer {layer}, branch '{branch}': step", step)
        if isinstance(q, torch.Tensor) and capturing(q.device):
            raise InputError(
                "a CUDA graph is being captured, and a session counts steps on the host, which a "
                "replay wouldn't; expected a call outside the capture."
            )
        if text_tokens is None:
            text_tokens = self._text_tokens
        text_tokens = whole_number("text tokens", text_tokens)
        state = self._state(step, layer, branch, (q, k, v), text_tokens)
        # Autocast would take products of float32 in 16 bits, and weigh other blocks.
        with torch.autocast(q.device.type, enabled=False), on_device(q):
            return self._go_on(state, step, layer, branch, (q, k, v))

    def _go_on(
        self, state: LayerState, step: int, layer: int, branch: str, qkv: QKV
    ) -> torch.Tensor:
        """The step of a layer whose call was checked."""
        before, action = state, self.rule.action(step)
        watch, device = self._tally.watch, qkv[0].device
        records = None
        if action == "full":
            with watch.measure("full", device):
                out = self._full(*qkv)
        elif action == "reuse":
            with watch.measure("reused", device):
                out = self._by_plan(state, *map(state.order.forward, qkv))
                out = spread_nan(state.order.back(out), *qkv)
        else:
            with watch.measure("searched", device):
                found = self._search(step, state, qkv)
                out = state.order.back(found.out)
                if state.memory.candidates is not None:
                    out = spread_nan(out, *qkv)
            longest = self._look(found, step, layer, branch)
            bits, N = state.memory.candidates, state.prepared.sizes.N
            evaluated = 1.0 if bits is None else mask_from_packed(bits, N).mean(dtype=torch.float32)
            with watch.measure("planned", device):
                state = self._remember(state, found, self.rule.uses(step), longest)
            policies = tuple(dict.fromkeys(state.plan.policies)) if state.plan is not None else ()
            density = found.keep.mean(dtype=torch.float32)
            records = (step, layer, branch, density, evaluated, policies)
        with _storing.lock:
            if self._states.get((layer, branch)) is not (before if before.next_step else None):
                raise InputError(
                    f"layer {layer}, branch '{branch}', step {step}: another thread called or "
                    "reset the session during this call; expected a session for each run."
                )
            self._tally.calls[action] += 1
            if records is not None:
                self._tally.searches.append(records)
                self._tally.plans += bool(records[-1])
            self._states[layer, branch] = dataclasses.replace(
                state, next_step=step + 1, thread=threading.get_ident()
            )
        return out

    def _state(self, step: int, layer: int, branch: str, qkv: QKV, text_tokens: int) -> LayerState:
        """The layer's past, if this call goes on from it."""
        where, state = f"layer {layer}, branch '{branch}'", self._states.get((layer, branch))
        if threading.get_ident() in self._cut_off:
            raise InputError(
                f"{where}, step {step}: another thread reset the session in the middle of this "
                "thread's run; expected a session for each run, or reset() before the next one."
            )
        check_step(where, step, state, self.rule.steps)
        sequences, (q, k, _) = Sequences.check(*qkv, "bshd"), qkv
        if k.shape != q.shape:
            raise InputError(
                f"{where}: q is {list(q.shape)}, k and v are {list(k.shape)}; expected "
                "self-attention, with a K/V head for each query head."
            )
        signature: Signature = (q.shape, q.dtype, q.device, text_tokens)
        if state is not None:
            if state.signature != signature:
                raise InputError(
                    f"{where}: q is {told(signature)} at step {step} and was "
                    f"{told(state.signature)} before; expected the same to the end of the run. "
                    "Another run begins with reset()."
                )
            return state
        B, L, H, _ = q.shape
        order = self._orders.get(text_tokens) or TokenOrder(
            self._order_name, self._grid, text_tokens
        )
        order.check(L)
        if text_tokens not in self._orders:
            make_room(self._orders, _MOST_TEXTS)
            self._orders[text_tokens] = order
        M, N = (-(-L // size) for size in self._block)
        sizes = sequences.fitted(mask_sizes((B * H, M, N), B, self._block, sequences.tokens))
        prepared = prepare(self._terms, sizes, q.device, self._regime, SEARCH_LOOK_FRAC)
        return LayerState(signature, order, prepared)

    def _by_plan(
        self, state: LayerState, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention over the blocks in use, everything before the first search."""
        if state.plan is None:
            return self._full(q, k, v)
        return attend_by_plan(q, k, v, plan=state.plan, layout="bshd")

    def _search(self, step: int, state: LayerState, qkv: QKV) -> Found:
        q, k, v = map(state.order.forward, qkv)
        memory, schedule = state.memory, None
        if memory.candidates is not None:
            candidates = mask_from_packed(memory.candidates, state.prepared.sizes.N)
            memory = dataclasses.replace(memory, candidates=candidates)
            if state.first_policies and self.rule.takes_schedule:
                # The candidates are the first mask: what was chosen for it fits, and what was
                # chosen for a sparser one since may not.
                schedule = self._planners.lists(candidates, state.prepared, state.first_policies)
        call = StepCall(step, q, k, v, self._block, state.order.text_tokens, schedule)
        found = self.rule.search(call, memory, lambda: self._by_plan(state, q, k, v))
        if self._check_finite:  # else nothing looks: what can't be weighed is kept
            return found
        keep = found.keep | ~found.finite
        first = found.memory.candidates is found.keep
        memory = dataclasses.replace(found.memory, candidates=keep) if first else found.memory
        return dataclasses.replace(found, keep=keep, memory=memory)

    def _look(self, found: Found, step: int, layer: int, branch: str) -> int | None:
        """The longest row, after a look at whether there are scores at all."""
        if not self._check_finite:
            return None
        longest = found.keep.sum(-1, dtype=torch.int32).amax()
        finite, blocks = torch.stack([found.finite.int(), longest]).tolist()
        if not finite:
            raise InputError(
                f"layer {layer}, branch '{branch}', step {step}: {found.otherwise}. The session is "
                "as it was before this call."
            )
        return int(blocks)

    def _remember(
        self, state: LayerState, found: Found, uses: int, longest: int | None
    ) -> LayerState:
        memory, plan = found.memory, None
        if uses:
            plan = self._planners.plan(found.keep, state.prepared, uses, longest)
        kept = pack(found.keep)
        if memory.candidates is not None:
            bits = kept if memory.candidates is found.keep else pack(memory.candidates)
            memory = dataclasses.replace(memory, candidates=bits)
        first = state.first_policies or (plan.policies if plan is not None else ())
        return dataclasses.replace(state, memory=memory, plan=plan, keep=kept, first_policies=first)
