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
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from wavealign.attention.plans import Buffers
from wavealign.attention.stateful import Attention, Reuse, Statistics
from wavealign.errors import InputError
from wavealign.integrations.capture import self_attentions
from wavealign.integrations.dispatch import Site, SiteProcessor
from wavealign.integrations.padding import Lengths, Padding
from wavealign.methods.registry import find_method
from wavealign.sessions import SESSIONS

_TRANSFORMERS = "diffusers.models.transformers.transformer_"
_MODELS = {  # class: module of its processors
    "WanTransformer3DModel": "wan",
    "LTXVideoTransformer3DModel": "ltx",
    "HunyuanVideoTransformer3DModel": "hunyuan_video",
    "HunyuanVideoFramepackTransformer3DModel": "hunyuan_video",
    "HunyuanVideo15Transformer3DModel": "hunyuan_video15",
}
_MOST_KEPT = 2  # masks of a layer, by sequence lengths: guidance calls with another text


S = TypeVar("S", bound=Site)


class MaskFunction(Protocol):
    """How a mask comes from Q and K.

    One with a parameter ``text_tokens`` is also told how many tokens of text end the sequence.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """From ``[B, tokens, H, D]`` to bool ``[H, M, N]`` or ``[B, H, M, N]``."""
        ...


@dataclass
class _Kept:
    """Masks of a layer that calls share: those of each part of the batch."""

    masks: list[torch.Tensor] = field(default_factory=list)
    age: int = 0


@dataclass
class _MaskSite(Site):
    """A mask method's."""

    attention: Attention
    mask_function: Callable[..., torch.Tensor]
    tell_text: bool
    mask_every: int
    kept: dict[object, _Kept] = field(default_factory=dict)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths
    ) -> torch.Tensor:
        kept = self._kept((q.shape, lengths))

        def one(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            mask = kept.masks[i] if i < len(kept.masks) else self._mask(q, k, lengths)
            made = self.attention(q, k, v, mask)
            assert isinstance(made, torch.Tensor)
            if self.mask_every > 1 and i == len(kept.masks):
                kept.masks.append(mask)  # otherwise not: a mask a layer would add up
            return made

        return lengths.attend(q, k, v, one)

    def _kept(self, key: object) -> _Kept:
        kept = self.kept.pop(key, _Kept())
        if kept.age >= self.mask_every:
            kept = _Kept()
        kept.age += 1
        if self.mask_every > 1:
            if len(self.kept) >= _MOST_KEPT:
                self.kept.pop(next(iter(self.kept)))
            self.kept[key] = kept
        return kept

    def _mask(self, q: torch.Tensor, k: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        if not self.tell_text:
            return self.mask_function(q, k)
        return self.mask_function(q, k, text_tokens=q.shape[1] - lengths.video_tokens)


def enable(
    transformer: torch.nn.Module,
    method: str | MaskFunction = "xattention",
    *,
    params: Any = None,
    block: tuple[int, int] | None = None,
    profile: str | None = None,
    policy: str = "auto",
    backend: str = "auto",
    reuse: Reuse | None = None,
    mask_every: int = 1,
    min_tokens: int = 0,
) -> None:
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
        mask_every: calls of a layer, with sequences of the same lengths, that share a mask; more
            than one keeps masks for each layer, ``B·H·M·N`` bytes for each of the last two lengths.
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
    if mask_every < 1:
        raise InputError(f"mask_every is {mask_every}; expected at least 1.")
    function = named_method(method, params) if isinstance(method, str) else method
    block = _block_of(method, params, block)
    tell_text = _takes_text(function)
    buffers, padding = Buffers(), Padding()

    def site(_: int, processor: Any) -> Site:
        attention = Attention(
            profile, reuse, policy=policy, backend=backend, layout="bshd", block=block,
            buffers=buffers,
        )  # fmt: skip
        return _MaskSite(processor, min_tokens, padding, attention, function, tell_text, mask_every)

    put_sites(transformer, site)


def put_sites(transformer: torch.nn.Module, site: Callable[[int, Any], Site]) -> None:
    """Put under every self-attention what `site` makes of the layer's number and its processor.

    Raises:
        InputError: another model, or one that is enabled already.
    """
    modules = _attentions(transformer)
    name = type(transformer).__name__
    if any(isinstance(module.processor, SiteProcessor) for module in modules):
        raise InputError(f"this {name} is enabled already; disable it first.")
    home = importlib.import_module(_TRANSFORMERS + _MODELS[name]).__name__
    made = [SiteProcessor(site(i, m.processor), home) for i, m in enumerate(modules)]
    for module, processor in zip(modules, made, strict=True):
        module.processor = processor
        processor.hold()


def disable(transformer: torch.nn.Module) -> None:
    """Give the transformer its own attention back.

    Raises:
        InputError: it isn't enabled.
    """
    enabled = [m for m in _attentions(transformer) if isinstance(m.processor, SiteProcessor)]
    if not enabled:
        raise InputError(f"this {type(transformer).__name__} isn't enabled.")
    for module in enabled:
        module.processor = module.processor.remove()


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


def named_method(name: str, params: Any = None) -> MaskFunction:
    """A method of `wavealign.methods` as a function of Q, K and text tokens.

    Raises:
        InputError: an unknown method, one that doesn't look at Q and K, or parameters of another.
    """
    from wavealign import methods
    from wavealign.methods.context import HeadContext

    chosen = methods.find_method(name)
    params = chosen.settings(params)
    if not chosen.needs_qk:
        raise InputError(
            f"{name} doesn't look at Q and K; expected a method that does, or a function that "
            "returns a mask made beforehand: lambda q, k: mask."
        )

    def mask_function(q: torch.Tensor, k: torch.Tensor, text_tokens: int = 0) -> torch.Tensor:
        context = HeadContext(0, q.shape[1], text_tokens=text_tokens)
        with torch.autocast(q.device.type, enabled=False):  # it would round the method's sums
            return methods.head_masks(name, q, k, params, context)

    return mask_function


def sites_of(transformer: torch.nn.Module, kind: type[S]) -> Iterator[S]:
    """The sites of a kind that stand under a transformer, layer by layer."""
    for module in _attentions(transformer):
        site = getattr(module.processor, "_site", None)
        if isinstance(site, kind):
            yield site


def _attentions(transformer: torch.nn.Module) -> list[Any]:
    name = type(transformer).__name__
    if name not in _MODELS:
        raise InputError(f"{name} isn't supported; expected one of {', '.join(_MODELS)}.")
    return self_attentions(transformer)


def _block_of(
    method: str | MaskFunction, params: Any, block: tuple[int, int] | None
) -> tuple[int, int]:
    """The block of the masks: a method's own, or a function's as it is given."""
    own = (128, 128)
    if isinstance(method, str):
        own = find_method(method).settings(params).block_size()
    if block is None:
        return own
    pair = isinstance(block, tuple | list) and len(block) == 2
    if not pair or not all(isinstance(n, int) and n > 0 for n in block):
        raise InputError(f"block={block}; expected two sizes in tokens, e.g. block=(128, 64).")
    if isinstance(method, str) and tuple(block) != own:
        raise InputError(
            f"block={block}: {method} makes blocks of {own[0]}x{own[1]}; leave block out, and "
            "give params another block where the method can."
        )
    return block[0], block[1]


def _takes_text(function: Callable[..., Any]) -> bool:
    try:
        return "text_tokens" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return False
