"""WaveAlign under a diffusers video transformer: `enable` and `disable`.

The model's own processors go on computing projections, norms and rotary embeddings. What changes
is the attention operation that they call, and only while a self-attention of an enabled
transformer runs: the model module's ``dispatch_attention_fn`` is replaced by one that asks which
site is active, and calls the original where none is.

Wan, LTX and HunyuanVideo. The last has text behind the video in the same sequence, and padding
behind the text: attention and the mask method see the tokens in front of the padding only.
"""

from __future__ import annotations

import contextvars
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from wavealign.attention.lanes import Lanes, capturing
from wavealign.attention.plans import Buffers
from wavealign.attention.stateful import Attention, Reuse, Statistics
from wavealign.errors import InputError
from wavealign.integrations.capture import self_attentions
from wavealign.integrations.mask_functions import MaskFunction, named_method, takes_text
from wavealign.integrations.padding import Lengths, Padding
from wavealign.integrations.progress import ThreadProgress, Watch
from wavealign.sessions import SESSIONS

_TRANSFORMERS = "diffusers.models.transformers.transformer_"
_MODELS = {  # class: module of its processors
    "WanTransformer3DModel": "wan",
    "LTXVideoTransformer3DModel": "ltx",
    "HunyuanVideoTransformer3DModel": "hunyuan_video",
    "HunyuanVideoFramepackTransformer3DModel": "hunyuan_video",
    "HunyuanVideo15Transformer3DModel": "hunyuan_video15",
}
_SLOT = "_wavealign"


@dataclass
class Site:
    """What stands behind a self-attention of an enabled transformer.

    Attributes:
        original: the model's processor.
        min_tokens: shorter sequences go to the model's own attention.
        padding, progress: shared by all sites.
    """

    original: Any
    min_tokens: int
    padding: Padding
    progress: Watch

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths
    ) -> torch.Tensor:
        """Attention of a call.

        Args:
            q, k, v: ``[B, tokens, H, D]``, rotated.
            lengths: tokens of each sequence that count.
        """
        raise NotImplementedError


S = TypeVar("S", bound=Site)


@dataclass
class _Kept:
    """Masks of a layer and branch that steps share: those of each part of the batch."""

    run: int
    step: int
    masks: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _MaskSite(Site):
    """A mask method's."""

    attention: Attention
    mask_function: Callable[..., torch.Tensor]
    tell_text: bool
    mask_every: int
    kept: Lanes[object, _Kept] = field(default_factory=Lanes)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths
    ) -> torch.Tensor:
        # A graph's memory is its own: what is captured keeps nothing.
        keeps = self.mask_every > 1 and not capturing(q.device)
        kept = self._kept(q.device, q.shape, lengths) if keeps else _Kept(0, 0)

        def one(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            known = i < len(kept.masks)
            mask = kept.masks[i] if known else self._mask(q, k, lengths)
            if keeps and not known:
                mask = mask.clone()  # nobody else writes to it
            made = self.attention(q, k, v, mask, same_mask=known)
            assert isinstance(made, torch.Tensor)
            if keeps and not known:
                kept.masks.append(mask)  # otherwise not: a mask a layer would add up
            return made

        return lengths.attend(q, k, v, one)

    def _kept(self, device: torch.device, *of: object) -> _Kept:
        """What this run's last steps kept for the branch and these sizes; nothing else stays."""
        place = self.progress.place
        if place is None:
            raise InputError("an attention layer was called outside its transformer.")
        lane = self.kept.here(device)
        for key, kept in list(lane.items()):
            if kept.run != place.run or place.step - kept.step >= self.mask_every:
                del lane[key]
        return lane.setdefault((place.branch, of), _Kept(place.run, place.step))

    def _mask(self, q: torch.Tensor, k: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        if not self.tell_text:
            return self.mask_function(q, k)
        return self.mask_function(q, k, text_tokens=q.shape[1] - lengths.video_tokens)


_active: contextvars.ContextVar[tuple[Site, Lengths] | None] = contextvars.ContextVar(
    "site", default=None
)


class _Processor:
    """The model's processor, with its site active while it runs."""

    def __init__(self, site: Site, module: str) -> None:
        self._site, self._module = site, module

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _install(importlib.import_module(self._module))  # it may have come from another process

    def __getattr__(self, name: str) -> Any:
        if name == "_site":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._site.original, name)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *rest: Any,
        image_rotary_emb: Any = None,  # diffusers passes what it finds in this signature
        **named: Any,
    ) -> Any:
        site = self._site
        batch, video = hidden_states.shape[:2]
        text = encoder_hidden_states.shape[1] if encoder_hidden_states is not None else 0
        if image_rotary_emb is not None:
            named["image_rotary_emb"] = image_rotary_emb
        active = None
        if video + text >= site.min_tokens:
            active = site, site.padding.lengths(attention_mask, batch, video, text)
            if attention_mask is not None:
                # HunyuanVideo 1.5 makes a mask of tokens x tokens of it in every layer, gigabytes
                # that nothing reads now. On this device it is a shape without memory.
                attention_mask = torch.empty_like(attention_mask, device="meta")
        token = _active.set(active)
        try:
            return site.original(
                attn, hidden_states, encoder_hidden_states, attention_mask, *rest, **named
            )
        finally:
            _active.reset(token)


def enable(
    transformer: torch.nn.Module,
    method: str | MaskFunction = "xattention",
    *,
    params: Any = None,
    block: tuple[int, int] = (128, 128),
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
        block: tokens of a query and of a K/V block of the masks.
        profile, policy, backend, reuse: see `Attention`.
        mask_every: steps that share a mask of a layer. More than one keeps masks for each layer,
            ``B·H·M·N`` bytes for each branch of the guidance, and steps are told as `Progress`
            says: timesteps must fall, and reading them and the text makes the host wait.
        min_tokens: shorter sequences, padding included, go to the model's own attention.

    Raises:
        InputError: another model, one that is enabled already, or unknown names.
    """
    if isinstance(method, str) and method in SESSIONS:
        raise InputError(
            f"{method} searches at some steps of a run and reuses in between: "
            "wavealign.integrations.diffusers_sessions.enable_session."
        )
    if mask_every < 1:
        raise InputError(f"mask_every is {mask_every}; expected at least 1.")
    function = named_method(method, params) if isinstance(method, str) else method
    tell_text = takes_text(function)
    buffers, padding, progress = Buffers(), Padding(), ThreadProgress()

    def site(_: int, processor: Any) -> Site:
        attention = Attention(
            profile, reuse, policy=policy, backend=backend, layout="bshd", block=block,
            buffers=buffers,
        )  # fmt: skip
        return _MaskSite(
            processor, min_tokens, padding, progress, attention, function, tell_text, mask_every
        )

    put_sites(transformer, site)
    if mask_every > 1:
        progress.watch(transformer)


def put_sites(transformer: torch.nn.Module, site: Callable[[int, Any], Site]) -> None:
    """Put under every self-attention what `site` makes of the layer's number and its processor.

    Raises:
        InputError: another model, or one that is enabled already.
    """
    modules = _attentions(transformer)
    name = type(transformer).__name__
    if any(isinstance(module.processor, _Processor) for module in modules):
        raise InputError(f"this {name} is enabled already; disable it first.")
    models = _TRANSFORMERS + _MODELS[name]
    for layer, module in enumerate(modules):
        module.processor = _Processor(site(layer, module.processor), models)
    _install(importlib.import_module(models))


def disable(transformer: torch.nn.Module) -> None:
    """Give the transformer its own attention back.

    Raises:
        InputError: it isn't enabled.
    """
    enabled = [m for m in _attentions(transformer) if isinstance(m.processor, _Processor)]
    if not enabled:
        raise InputError(f"this {type(transformer).__name__} isn't enabled.")
    for module in enabled:
        module.processor._site.progress.close()
        module.processor = module.processor._site.original


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
    for module in _attentions(transformer):
        site = getattr(module.processor, "_site", None)
        if isinstance(site, kind):
            yield site


def _attentions(transformer: torch.nn.Module) -> list[Any]:
    name = type(transformer).__name__
    if name not in _MODELS:
        raise InputError(f"{name} isn't supported; expected one of {', '.join(_MODELS)}.")
    return self_attentions(transformer)


def _install(module: Any) -> None:
    """Replace the module's attention operation by one that looks for an active site; once."""
    original: Callable[..., torch.Tensor] = module.dispatch_attention_fn
    if hasattr(original, _SLOT):
        return

    def dispatch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        active = _active.get()
        if active is None:
            return original(query, key, value, *rest, **named)
        mask = rest[0] if rest else named.get("attn_mask")
        if mask is not None and not mask.is_meta:
            raise InputError("an attention mask beside the block mask; expected none.")
        if named.get("parallel_config") is not None:
            raise InputError(
                "context parallelism: this device has a part of the sequence only, and a block "
                "mask is over all of it; expected a transformer without."
            )
        site, lengths = active
        return site.attend(query, key, value, lengths)

    setattr(dispatch, _SLOT, True)
    module.dispatch_attention_fn = dispatch
