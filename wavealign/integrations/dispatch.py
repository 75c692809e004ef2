"""diffusers' attention operation, replaced in a model's module while somebody needs it.

A model's processors call ``dispatch_attention_fn`` of their module. Sites and a capture put
wrappers around it, in any order, and take them off in any order; with the last one the original
is back. A `SiteProcessor` stands where the model's processor was, and says which site is active.
"""

from __future__ import annotations

import contextvars
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from wavealign._locks import ForkSafeLock
from wavealign.errors import InputError
from wavealign.integrations.padding import Lengths, Padding
from wavealign.integrations.watch import Watch
from wavealign.numbers import whole_number

DISPATCH = "dispatch_attention_fn"
_TORCHS_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
_SLOT = "_wavealign"  # of a replaced operation: the original and the wrappers around it

Operation = Callable[..., Tensor]
Wrapper = Callable[[Operation], Operation]


def wrap(module: ModuleType, wrapper: Wrapper, inside: bool = False) -> None:
    """Put a wrapper around a module's operation; once.

    Args:
        module: of a model.
        wrapper: makes an operation of an operation.
        inside: next to the original, below all others.
    """
    original, wrappers = _wrapped(module)
    if wrapper not in wrappers:
        _set(module, original, (wrapper, *wrappers) if inside else (*wrappers, wrapper))


def unwrap(module: ModuleType, wrapper: Wrapper) -> None:
    """Take a wrapper off; nothing happens where it isn't there."""
    original, wrappers = _wrapped(module)
    if wrapper in wrappers:
        _set(module, original, tuple(w for w in wrappers if w != wrapper))


def _wrapped(module: ModuleType) -> tuple[Operation, tuple[Wrapper, ...]]:
    current = getattr(module, DISPATCH)
    found: tuple[Operation, tuple[Wrapper, ...]] = getattr(current, _SLOT, (current, ()))
    return found


def _set(module: ModuleType, original: Operation, wrappers: tuple[Wrapper, ...]) -> None:
    operation = original
    for wrapper in wrappers:
        operation = wrapper(operation)
    if wrappers:
        setattr(operation, _SLOT, (original, wrappers))
    setattr(module, DISPATCH, operation)


@dataclass
class Site:
    """What stands behind a self-attention of an enabled transformer.

    Attributes:
        original: the model's processor.
        min_tokens: shorter sequences go to the model's own attention.
        padding, progress: shared by all sites.
        layer: of the transformer, from 0.

    Raises:
        InputError: `min_tokens` is no whole number.
    """

    original: Any
    min_tokens: int
    padding: Padding
    progress: Watch
    layer: int

    def __post_init__(self) -> None:
        whole_number("min_tokens", self.min_tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
        """Attention of a call.

        Args:
            q, k, v: ``[B, tokens, H, D]``, rotated.
            lengths: tokens of each sequence that count.
        """
        raise NotImplementedError


@dataclass
class _Call:
    """A call of a self-attention that has a site, while its processor runs."""

    site: Site
    lengths: Lengths
    attended: bool = False

    @torch.compiler.disable
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False, attention_kwargs: dict[str, Any] | None = None, *,
        backend: Any = None, parallel_config: Any = None, **unknown: Any,
    ) -> Tensor:  # fmt: skip
        """What ``dispatch_attention_fn`` does, by the site: exactly what is asked, or an error."""
        if attn_mask is not None and not attn_mask.is_meta:
            raise InputError("an attention mask beside the block mask; expected none.")
        _refuse_parallel(parallel_config)
        _refuse_stand_ins()
        asked = {**(attention_kwargs or {}), **unknown}
        asked.update({"dropout_p": dropout_p} if dropout_p else {})
        asked.update({"is_causal": is_causal} if is_causal else {})
        if asked:
            told = ", ".join(f"{name}={given}" for name, given in asked.items())
            raise InputError(f"attention with {told}: a block mask can't; expected none of it.")
        if query.shape[1] != key.shape[1] or (query.shape[2] != key.shape[2] and not enable_gqa):
            raise InputError(
                f"queries {list(query.shape)} and keys {list(key.shape)} in a self-attention; "
                "expected as many, and as many heads without enable_gqa."
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (
                t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value)
            )
        root = math.sqrt(query.shape[-1])
        if scale is not None and not math.isclose(scale * root, 1):
            query = query * (scale * root)
        self.attended = True
        return self.site.attend(query, key, value, self.lengths)


_active: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("call", default=None)


def _by_sites(original: Operation) -> Operation:
    """The operation that asks which site is active, and calls the original where none is."""

    def dispatch(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
        call = _active.get()
        return (original if call is None else call.attend)(query, key, value, *rest, **named)

    return dispatch


def refuse_parallel(model: Any, *_: Any) -> None:
    """Raise where a model's sequence is split over devices, whatever its processors say.

    Raises:
        InputError: it is.
    """
    config = getattr(model, "_parallel_config", None)
    _refuse_parallel(getattr(config, "context_parallel_config", config))  # heads may be split


def _refuse_parallel(config: Any) -> None:
    if config is not None:
        raise InputError(
            "context parallelism: this device has a part of the sequence only, and a block "
            "mask is over all of it; expected a transformer without."
        )


def _refuse_stand_ins() -> None:
    """Raise where somebody may replace torch's attention on the way, which isn't called here.

    Guidance that skips attention does so, and context parallelism outside of diffusers.
    """
    operation = torch.nn.functional.scaled_dot_product_attention
    replaced = getattr(sys.modules.get(_TORCHS_PARALLEL), "_replaced_functions", {})
    _refuse_parallel(replaced.get(operation))
    for mode in _get_current_function_mode_stack():
        if not isinstance(mode, DeviceContext):
            raise InputError(
                f"{type(mode).__name__} is active, a TorchFunctionMode, and may replace torch's "
                "attention, which a block mask doesn't call; expected none around the transformer."
            )


class SiteProcessor:
    """The model's processor, with its site active while it runs, until it is removed.

    What is read from it and set on it (``set_attention_backend``) is the model's processor's.
    """

    def __init__(self, site: Site, module: str) -> None:
        _refuse_parallel(getattr(site.original, "_parallel_config", None))
        vars(self).update(_site=site, _module=module, _removed=False)

    def __getattr__(self, name: str) -> Any:
        if name in ("_site", "_removed"):  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._site.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._site.original, name, value)

    @torch.compiler.disable
    def hold(self) -> None:
        """See to it that the module asks for sites as long as this processor is under a model."""
        with _holding.lock:
            wrap(sys.modules[self._module], _by_sites, inside=True)
            if self not in _held:  # new, or a copy of one
                _held.add(self)
                weakref.finalize(self, _release, self._module).atexit = False

    def watch(self, hook: Any) -> None:
        """Take a hook of the model off, too, when this is removed."""
        self._site.progress.keep(hook)

    def remove(self) -> None:
        """Be the model's processor from now on, wherever it was put meanwhile."""
        vars(self).update(_removed=True)
        self._site.progress.close()
        with _holding.lock:
            _held.discard(self)
            _release(self._module)

    @property
    def original(self) -> Any:
        """The model's processor."""
        return self._site.original

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *rest: Any,
        image_rotary_emb: Any = None,  # diffusers passes what it finds in this signature
        **named: Any,
    ) -> Any:
        """See `SiteProcessor`; parameters are those of diffusers' processors.

        Raises:
            InputError: context parallelism, or a processor that attends by another operation.
        """
        site = self._site
        batch, video = hidden_states.shape[:2]
        text = encoder_hidden_states.shape[1] if encoder_hidden_states is not None else 0
        if image_rotary_emb is not None:
            named["image_rotary_emb"] = image_rotary_emb
        call = None
        if video + text >= site.min_tokens and not self._removed:
            for processor in (self, getattr(attn, "processor", None)):  # that one may wrap this
                _refuse_parallel(getattr(processor, "_parallel_config", None))
            self.hold()
            lengths = site.padding.lengths(attention_mask, batch, video, text, site.layer)
            call = _Call(site, lengths)
            if attention_mask is not None:
                # HunyuanVideo 1.5 makes a mask of tokens x tokens of it in every layer, gigabytes
                # that nothing reads now. On this device it is a shape without memory.
                attention_mask = torch.empty_like(attention_mask, device="meta")
        before = _active.get()
        try:  # Ctrl-C may come right behind `set`, which must not outlast this call
            _active.set(call)
            out = site.original(
                attn, hidden_states, encoder_hidden_states, attention_mask, *rest, **named
            )
        finally:
            _active.set(before)
        if call is not None and not call.attended:
            raise InputError(
                f"{type(site.original).__name__} attended without {self._module}.{DISPATCH}, so "
                "no block mask was applied; expected a processor that calls it there."
            )
        return out


_held: weakref.WeakSet[SiteProcessor] = weakref.WeakSet()
_holding = ForkSafeLock()  # a thread that holds it may collect a processor, which releases


def _release(module: str) -> None:
    """Give a module its operation back when no processor needs it."""
    with _holding.lock:
        if module in sys.modules and not any(processor._module == module for processor in _held):
            unwrap(sys.modules[module], _by_sites)
