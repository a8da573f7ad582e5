"""A GPT decoder: pre-LN, SDPA or ring attention, rotary or learned positions, GPT-2 init; and its loss."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilitykit.parallel.layout import IGNORED
from stabilitykit.parallel.ring import ring_attention
from stabilitykit.parallel.transport import Ring

# In each process its own; or one ring of all, the tokens dealt out so. Flat: a command line names them all.
Attending = Literal["local", "contiguous", "striped", "zigzag"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of a GPT.

    Raises:
        ValueError: sizes that do not fit together, naming them.
    """

    vocab_size: int
    context: int  # the most tokens that one sequence may have
    layers: int
    heads: int
    width: int
    kv_heads: int | None = None  # None: as many as heads; fewer: grouped-query attention
    mlp_ratio: int = 4
    positions: Literal["rope", "learned"] = "rope"
    tied_head: bool = True
    qk_layernorm: bool = False
    bias: bool = True
    dropout: float = 0.0
    attention: Attending = "local"

    def __post_init__(self):
        for name in ("vocab_size", "context", "layers", "heads", "width", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"expected a width that heads divide, got width {self.width}, heads {self.heads}"
            )
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(f"expected kv_heads that divide heads {self.heads}, got {self.key_heads}")
        if self.positions not in ("rope", "learned"):
            raise ValueError(f"expected positions 'rope' or 'learned', got {self.positions!r}")
        if self.positions == "rope" and self.head_width % 2:
            raise ValueError(f"expected an even width per head for rope, got {self.head_width}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {self.dropout}")
        if self.attention not in get_args(Attending):
            raise ValueError(f"expected attention {', '.join(get_args(Attending))}, got {self.attention!r}")
        if self.attention != "local" and self.dropout:
            raise ValueError(
                f"expected dropout 0 with attention {self.attention!r} (a ring has none), got {self.dropout}"
            )

    @property
    def key_heads(self) -> int:
        """Heads of the keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Numbers per head and token."""
        return self.width // self.heads

    def admit(self, length: int) -> None:
        """Nothing, for a sequence of `length` tokens, those of all ranks together.

        Raises:
            ValueError: more tokens than the context.
        """
        if length > self.context:
            raise ValueError(f"expected at most {self.context} tokens (the context), got {length}")


class Linear(nn.Linear):
    """nn.Linear; under bf16 autocast on a CPU the same arithmetic by way of a float32 product.

    Products of two bf16 numbers are exact in float32, where a bf16 kernel adds them up, too.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: D102 (nn.Module's)
        if input.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        # Without AVX-512, torch multiplies bf16 matrices in a scalar loop, about 20 times slower.
        dtype = torch.get_autocast_dtype("cpu")
        bias = None if self.bias is None else self.bias.to(dtype).float()
        with torch.autocast("cpu", enabled=False):
            product = F.linear(input.to(dtype).float(), self.weight.to(dtype).float(), bias)
        return product.to(dtype)


class Attention(nn.Module):
    """Causal self-attention; over the tokens of all ranks, if so configured."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        heads = config.heads + 2 * config.key_heads
        self.qkv = Linear(config.width, heads * config.head_width, bias=config.bias)
        self.out = Linear(config.width, config.width, bias=config.bias)
        norm = nn.LayerNorm if config.qk_layernorm else nn.Identity
        self.q_norm = norm(config.head_width)
        self.k_norm = norm(config.head_width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """[B, T, width] -> [B, T, width]; `angles` as `rope_angles` gives them."""
        config = self.config
        heads, key_heads = config.heads, config.key_heads
        per_head = self.qkv(x).unflatten(-1, (-1, config.head_width)).transpose(1, 2)
        q, k, v = per_head.split((heads, key_heads, key_heads), dim=1)  # [B, heads, T, head_width]
        q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rotated(q, angles), rotated(k, angles)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if config.attention == "local":
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                dropout_p=config.dropout if self.training else 0.0,
                enable_gqa=key_heads != heads,
            )
        else:
            attended = ring_attention(q, k, v, layout=config.attention)
        return self.dropout(self.out(attended.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two projections with GELU between them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.up = Linear(config.width, hidden, bias=config.bias)
        self.out = Linear(hidden, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        return self.dropout(self.out(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention and MLP, each with a LayerNorm before and a sum after."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens [B, T] int64 -> logits [B, T, vocab_size]."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context, config.width) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = Linear(config.width, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew: std 0.02, residual projections less (GPT-2, 2019, section 2.3).

        Makes a model ready that was built on the meta device and moved by `to_empty(device=...)`.
        """
        if self.config.tied_head:  # here, because to_empty() unties
            self.head.weight = self.tokens.weight
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(".out")  # two of them add to the stream in every layer
                std = 0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab_size] for tokens [B, T].

        `positions`, int64 [T]: where in their sequences the tokens are, below the context; 0..T-1 if None.

        Raises:
            ValueError: more tokens than the context, or no positions of tokens spread over ranks.
        """
        if positions is None:
            positions = self._all_positions(tokens)
        x = self.tokens(tokens)
        angles = None
        if self.positions is None:
            angles = rope_angles(positions, self.config.head_width)
        else:
            x = x + self.positions(positions)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))

    def _all_positions(self, tokens: Tensor) -> Tensor:
        self.config.admit(tokens.shape[1])
        world = 1 if self.config.attention == "local" else Ring().world
        if world > 1:
            raise ValueError(
                f"expected positions with attention {self.config.attention!r} over {world} ranks, got none"
            )
        return torch.arange(tokens.shape[1], device=tokens.device)


def rope_angles(positions: Tensor, head_width: int) -> Tensor:
    """Float32 angles in radians, [T, head_width / 2], of positions [T] (arXiv 2104.09864, equation 15)."""
    # Made anew in each forward, not kept in a buffer, which would be lost on the meta device.
    rates = 10_000 ** (-torch.arange(0, head_width, 2, device=positions.device) / head_width)
    return torch.outer(positions, rates)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """The vectors x [..., T, D] with each pair (i, i + D/2) turned by its angle, in float32 at least."""
    first, second = _wide(x).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def loss(
    logits: Tensor, targets: Tensor, *, z_loss: float = 0.0, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The training loss and its cross-entropy part, in nats per token, computed in float32 at least.

    The loss adds z_loss * mean(logsumexp(logits)^2) (PaLM, section 5; arXiv 2309.14322, section
    3.1.2). Logits are [B, T, V], targets [B, T] int64. With `tokens`, how many targets not IGNORED there
    are on all ranks, it is this rank's part of the means over them all: over the ranks it adds up.
    """
    logits, targets = _wide(logits).flatten(0, 1), targets.flatten()
    if tokens is None:
        cross_entropy = F.cross_entropy(logits, targets)
    else:
        cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / tokens
    if not z_loss:
        return cross_entropy, cross_entropy
    squares = logits.logsumexp(-1).square()
    square = squares.mean() if tokens is None else squares.masked_fill(targets == IGNORED, 0).sum() / tokens
    return cross_entropy + z_loss * square, cross_entropy


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
