"""WaveAlign under a diffusers video transformer: `enable` and `disable`.

The model's own processors go on computing projections, norms and rotary embeddings. What changes
is the attention operation that they call, and only while a self-attention of an enabled
transformer runs: the model module's ``dispatch_attention_fn`` is replaced by one that asks which
site is active, and calls the original where none is.

Wan and LTX. HunyuanVideo isn't supported: it hides text padding token by token, which a block mask
can't say.
"""

from __future__ import annotations

import contextvars
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from wavealign.attention.stateful import Attention, Buffers, Reuse, Statistics
from wavealign.errors import InputError

_MODELS = {
    # class: (module, where the blocks are, the self-attention of a block)
    "WanTransformer3DModel": (
        "diffusers.models.transformers.transformer_wan",
        "blocks",
        "attn1",
    ),
    "LTXVideoTransformer3DModel": (
        "diffusers.models.transformers.transformer_ltx",
        "transformer_blocks",
        "attn1",
    ),
}
_SLOT = "_wavealign"
SESSION_NAMES = ("gsrs", "adaspa", "liteattention", "topk")


class Site(Protocol):
    """What stands behind a self-attention of an enabled transformer."""

    min_tokens: int
    original: Any  # the processor

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of ``[B, tokens, H, D]``."""
        ...


class MaskFunction(Protocol):
    """How a mask comes from Q and K."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """From ``[B, tokens, H, D]`` to bool ``[H, M, N]`` or ``[B, H, M, N]``."""
        ...


@dataclass
class _Site:
    """One self-attention of an enabled transformer."""

    attention: Attention
    mask_function: MaskFunction
    mask_every: int
    min_tokens: int
    original: Any  # the processor
    mask: torch.Tensor | None = None
    age: int = 0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.age >= self.mask_every:
            self.mask, self.age = self.mask_function(q, k), 0
        self.age += 1
        out = self.attention(q, k, v, self.mask)
        if self.mask_every == 1:
            self.mask = None  # a mask a layer would add up
        assert isinstance(out, torch.Tensor)
        return out


_active: contextvars.ContextVar[Site | None] = contextvars.ContextVar("site", default=None)


class _Processor:
    """The model's processor, with its site active while it runs."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site.original, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        token = _active.set(self._site)
        try:
            return self._site.original(*arguments, **named)
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
        transformer: a Wan or LTX transformer of diffusers (``pipe.transformer``).
        method: name of a mask method (`wavealign.methods`), or a function of Q and K
            ``[B, tokens, H, D]`` to a bool mask.
        params: of a named method.
        block: tokens of a query and of a K/V block of the masks.
        profile, policy, backend, reuse: see `Attention`.
        mask_every: calls of a layer that share a mask; more than one keeps a mask for each layer,
            ``H·M·N`` bytes.
        min_tokens: shorter sequences go to the model's own attention.

    Raises:
        InputError: another model, one that is enabled already, or unknown names.
    """
    name, module_name, sites = _sites_of(transformer)
    if isinstance(method, str) and method in SESSION_NAMES:
        raise InputError(
            f"{method} searches at some steps of a run and reuses in between: "
            "wavealign.integrations.diffusers_sessions.enable_session."
        )
    if mask_every < 1:
        raise InputError(f"mask_every is {mask_every}; expected at least 1.")
    if any(isinstance(site.processor, _Processor) for site in sites):
        raise InputError(f"this {name} is enabled already; disable it first.")
    function = named_method(method, params) if isinstance(method, str) else method
    buffers = Buffers()
    for module in sites:
        attention = Attention(
            profile, reuse, policy=policy, backend=backend, layout="bshd", block=block,
            buffers=buffers,
        )  # fmt: skip
        site = _Site(attention, function, mask_every, min_tokens, module.processor)
        module.processor = _Processor(site)
    _install(importlib.import_module(module_name))


def disable(transformer: torch.nn.Module) -> None:
    """Give the transformer its own attention back.

    Raises:
        InputError: it isn't enabled.
    """
    name, _, sites = _sites_of(transformer)
    if not any(isinstance(site.processor, _Processor) for site in sites):
        raise InputError(f"this {name} isn't enabled.")
    for module in sites:
        if isinstance(module.processor, _Processor):
            run = getattr(module.processor._site, "run", None)
            if run is not None:
                run.hook.remove()
            module.processor = module.processor._site.original


def statistics(transformer: torch.nn.Module) -> Statistics:
    """What all sites of an enabled transformer have done, added up."""
    total = Statistics()
    for site in _enabled(transformer):
        for name, value in vars(site.attention.statistics).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def explain(transformer: torch.nn.Module) -> str:
    """The last decision of every layer, one line a head."""
    return "\n".join(
        f"layer {i}, {line}"
        for i, site in enumerate(_enabled(transformer))
        for line in site.attention.explain().splitlines()
    )


def named_method(name: str, params: Any = None) -> MaskFunction:
    """A method of `wavealign.methods`, head by head, as a function of Q and K.

    Raises:
        InputError: an unknown method.
    """
    from wavealign import methods

    methods.find_method(name)

    def mask_function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        group = q.shape[2] // k.shape[2]
        return torch.stack(
            [
                torch.stack(
                    [
                        methods.head_mask(name, q[b, :, h], k[b, :, h // group], params)
                        for h in range(q.shape[2])
                    ]
                )
                for b in range(q.shape[0])
            ]
        )

    return mask_function


def _sites_of(transformer: torch.nn.Module) -> tuple[str, str, list[Any]]:
    name = type(transformer).__name__
    if name not in _MODELS:
        raise InputError(
            f"{name} isn't supported; expected {' or '.join(_MODELS)}"
            + (": HunyuanVideo hides text padding token by token" if "Hunyuan" in name else "")
            + "."
        )
    module, blocks, attention = _MODELS[name]
    return name, module, [getattr(block, attention) for block in getattr(transformer, blocks)]


def _enabled(transformer: torch.nn.Module) -> Iterator[_Site]:
    for module in _sites_of(transformer)[2]:
        site = getattr(module.processor, "_site", None)
        if isinstance(site, _Site):
            yield site


def _install(module: Any) -> None:
    """Replace the module's attention operation by one that looks for an active site; once."""
    original = module.dispatch_attention_fn
    if hasattr(original, _SLOT):
        return

    def dispatch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        site = _active.get()
        if site is None or query.shape[1] < site.min_tokens:
            return _call(original, query, key, value, *rest, **named)
        if named.get("attn_mask") is not None:
            raise InputError("an attention mask beside the block mask; expected none.")
        return site.attend(query, key, value)

    setattr(dispatch, _SLOT, True)
    module.dispatch_attention_fn = dispatch


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> torch.Tensor:
    result = function(*arguments, **named)
    assert isinstance(result, torch.Tensor)
    return result
