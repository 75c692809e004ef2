"""WaveAlign under a diffusers video transformer: `enable` and `disable`.

The model's own processors go on computing projections, norms and rotary embeddings. What changes
is the attention operation that they call, and only while a self-attention of an enabled
transformer runs: the model module's ``dispatch_attention_fn`` is replaced by one that asks which
site is active, and calls the original where none is.

Wan, LTX and HunyuanVideo. The last has text behind the video in the same sequence, and padding
behind the text: attention and the mask method see the tokens in front of the padding only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from wavealign.attention.lanes import Lanes, capturing
from wavealign.attention.plans import Buffers
from wavealign.attention.stateful import Attention, Reuse, Statistics
from wavealign.errors import InputError
from wavealign.integrations.dispatch import Site, SiteProcessor, refuse_parallel
from wavealign.integrations.mask_functions import (
    MaskFunction,
    block_of,
    checked_function,
    named_method,
    takes_text,
)
from wavealign.integrations.models import MODELS, self_attentions
from wavealign.integrations.padding import Lengths, Padding
from wavealign.integrations.progress import ThreadProgress
from wavealign.integrations.watch import Place
from wavealign.numbers import whole_number
from wavealign.sessions import SESSIONS
from wavealign.sessions.rule import spread_nan

_TRANSFORMERS = "diffusers.models.transformers.transformer_"
_PLACED = "_wavealign"  # of a transformer: the processors that stand before its own

S = TypeVar("S", bound=Site)


@dataclass
class _Kept:
    """Masks of a layer, branch and grid that steps share: those of each part of the batch."""

    made: Place
    used: Place | None = None
    masks: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _MaskSite(Site):
    """A mask method's."""

    attention: Attention
    mask_function: Callable[..., torch.Tensor]
    tell_text: bool
    mask_every: int
    named: bool
    kept: Lanes[object, _Kept] = field(default_factory=Lanes)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths
    ) -> torch.Tensor:
        # A graph's memory is its own: what is captured keeps nothing.
        keeps = self.mask_every > 1 and not capturing(q.device)
        masks = self._kept(q.device, q.shape, lengths) if keeps else []

        def one(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            known = i < len(masks)
            mask = masks[i] if known else self._mask(q, k, lengths)
            if keeps and not known:
                mask = mask.clone()  # nobody else writes to it
            made = self.attention(q, k, v, mask, same_mask=known)
            assert isinstance(made, torch.Tensor)
            if keeps and not known:
                masks.append(mask)  # otherwise not: a mask a layer would add up
            # A method keeps all of a head with NaN, and wasn't asked.
            return spread_nan(made, q, k, v) if known and self.named else made

        return lengths.attend(q, k, v, one)

    def _kept(self, device: torch.device, *of: object) -> list[torch.Tensor]:
        """What this run's last steps kept for branch, grid and these sizes; nothing else stays."""
        place = self.progress.placed()
        lane = self.kept.here(device)
        for key, kept in list(lane.items()):
            if kept.made.run != place.run or place.step - kept.made.step >= self.mask_every:
                del lane[key]
        kept = lane.setdefault((place.branch, place.tokens, of), _Kept(place))
        if kept.used is place:
            raise InputError(
                "a layer attends twice in one call of the transformer, and mask_every keeps one "
                "mask for it; expected mask_every=1."
            )
        kept.used = place
        return kept.masks

    def _mask(self, q: torch.Tensor, k: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        if not self.tell_text:
            return self.mask_function(q, k)
        return self.mask_function(q, k, text_tokens=q.shape[1] - lengths.video_tokens)


def enable(
    transformer: torch.nn.Module, method: str | MaskFunction = "xattention", *, params: Any = None,
    block: tuple[int, int] | None = None, profile: str | None = None, policy: str = "auto",
    backend: str = "auto", reuse: Reuse | None = None, mask_every: int = 1, min_tokens: int = 0,
) -> None:  # fmt: skip
    """Put block-sparse attention under every self-attention of a transformer.

    Args:
        transformer: a Wan, LTX or HunyuanVideo transformer of diffusers (``pipe.transformer``).
        method: name of a mask method (`wavealign.methods`), or a function of Q and K
            ``[B, tokens, H, D]`` to a bool mask, see `MaskFunction`. Padding isn't among the
            tokens. Sequences of a batch with text of different lengths come one by one.
        params: of a named method.
        block: tokens of a query and of a K/V block of the masks; by default those that a named
            method makes, and 128x128 of a function.
        profile, policy, backend, reuse: see `Attention`.
        mask_every: steps that share a mask of a layer. More than one keeps masks for each layer,
            ``B·H·M·N`` bytes for each branch of the guidance and grid, and steps are told as
            `Progress` says: timesteps must fall, and reading them and the text makes the host wait.
        min_tokens: shorter sequences, padding included, go to the model's own attention.

    Raises:
        InputError: another model, one that is enabled already, unknown names, a method that
            doesn't look at Q and K, parameters of another method, or a block that isn't its own.
    """
    if isinstance(method, str) and method in SESSIONS:
        raise InputError(
            f"{method} searches at some steps of a run and reuses in between: "
            "wavealign.integrations.diffusers_sessions.enable_session."
        )
    if whole_number("mask_every", mask_every) < 1:
        raise InputError(f"mask_every is {mask_every}; expected at least 1.")
    if isinstance(method, str):
        function = named_method(method, params)
    else:
        function = checked_function(method, params)
    block = block_of(method, params, block)
    tell_text = takes_text(function)
    buffers, padding, progress = Buffers(), Padding(), ThreadProgress()

    def site(layer: int, processor: Any) -> Site:
        attention = Attention(
            profile, reuse, policy=policy, backend=backend, layout="bshd", block=block,
            buffers=buffers,
        )  # fmt: skip
        return _MaskSite(
            processor, min_tokens, padding, progress, layer, attention, function, tell_text,
            mask_every, isinstance(method, str),
        )  # fmt: skip

    put_sites(transformer, site, lambda: progress.watch(transformer) if mask_every > 1 else None)


def put_sites(
    transformer: torch.nn.Module, site: Callable[[int, Any], Site], begin: Callable[[], None]
) -> None:
    """Put a site under every self-attention, or under none.

    Args:
        transformer: that isn't enabled.
        site: makes one of the layer's number and its processor.
        begin: what else there is to do, last.

    Raises:
        InputError: another model, or one that is enabled already.
    """
    modules = _attentions(transformer)
    name = type(transformer).__name__
    if hasattr(transformer, _PLACED):
        raise InputError(f"this {name} is enabled already; disable it first.")
    refuse_parallel(transformer)
    home = importlib.import_module(_TRANSFORMERS + MODELS[name]).__name__
    made = [SiteProcessor(site(i, m.processor), home) for i, m in enumerate(modules)]
    try:
        setattr(transformer, _PLACED, made)
        made[0].watch(transformer.register_forward_pre_hook(refuse_parallel))
        for module, processor in zip(modules, made, strict=True):
            module.processor = processor
            processor.hold()
        begin()
    except BaseException:
        _take_off(transformer, modules, made)
        raise


def disable(transformer: torch.nn.Module) -> None:
    """Give the transformer its own attention back.

    Processors that were put into others since, or kept, are the model's own from then on.

    Raises:
        InputError: it isn't enabled.
    """
    modules, placed = _attentions(transformer), getattr(transformer, _PLACED, None)
    if placed is None:
        raise InputError(f"this {type(transformer).__name__} isn't enabled.")
    try:
        _take_off(transformer, modules, placed)
    except BaseException:  # Ctrl-C: not by halves
        _take_off(transformer, modules, placed)
        raise


def _take_off(
    transformer: torch.nn.Module, modules: list[Any], placed: list[SiteProcessor]
) -> None:
    for processor in placed:
        processor.remove()
    for module in modules:
        if module.processor in placed:
            module.processor = module.processor.original
    vars(transformer).pop(_PLACED, None)


def restart(transformer: torch.nn.Module) -> None:
    """Take the next call as the first of a run: under a session, or with ``mask_every``.

    Needed after a run that was broken off, and before each whose first two timesteps are equal in
    16 bits. Where threads have runs of their own it is this thread's.

    Raises:
        InputError: it isn't enabled.
    """
    for site in sites_of(transformer, Site):
        return site.progress.restart()
    raise InputError(f"this {type(transformer).__name__} isn't enabled.")


def statistics(transformer: torch.nn.Module) -> Statistics:
    """What all sites of an enabled transformer have done, added up."""
    total = Statistics()
    for site in sites_of(transformer, _MaskSite):
        for name, value in vars(site.attention.statistics).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def explain(transformer: torch.nn.Module) -> str:
    """The last decision of every layer, one line a head."""
    return "\n".join(
        f"layer {i}, {line}"
        for i, site in enumerate(sites_of(transformer, _MaskSite))
        for line in site.attention.explain().splitlines()
    )


def sites_of(transformer: torch.nn.Module, kind: type[S]) -> Iterator[S]:
    """The sites of a kind that stand under a transformer, layer by layer."""
    _attentions(transformer)
    for processor in getattr(transformer, _PLACED, ()):
        if isinstance(processor._site, kind):
            yield processor._site


def _attentions(transformer: torch.nn.Module) -> list[Any]:
    name = type(transformer).__name__
    if name not in MODELS:
        raise InputError(f"{name} isn't supported; expected one of {', '.join(MODELS)}.")
    return self_attentions(transformer)
