"""Video as a sequence of tokens: the token grid, token orders, rotary positions, clips."""

from wavealign.qk.grid import MODELS, TokenGrid, VideoModel, find_model
from wavealign.qk.orders import ORDERS, invert, token_order

__all__ = ["MODELS", "ORDERS", "TokenGrid", "VideoModel", "find_model", "invert", "token_order"]
