"""nanoGPT's CPU recipe for tiny Shakespeare, in PyTorch.

Written from its published description (Karpathy 2022): GPT-2 without biases, 4 layers
of 128 features and 4 heads, 2,000 updates of AdamW with 12 blocks of 64 characters.

Dims: B blocks, T tokens of a block, D features.
"""

import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

T, B, D, N_LAYER, N_HEAD = 64, 12, 128, 4, 4
LR, MIN_LR, WARMUP = 1e-3, 1e-4, 100
Curve = list[tuple[int, float, float]]  # updates, seconds, nats per character


class Block(nn.Module):
    """Causal attention and a feed-forward, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (
            nn.LayerNorm(D, bias=False),
            nn.LayerNorm(D, bias=False),
        )
        self.qkv, self.out = (
            nn.Linear(D, 3 * D, bias=False),
            nn.Linear(D, D, bias=False),
        )
        self.up, self.down = (
            nn.Linear(D, 4 * D, bias=False),
            nn.Linear(4 * D, D, bias=False),
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Returns the output of a layer."""
        heads = self.qkv(self.norm_1(x_BTD)).unflatten(-1, (3, N_HEAD, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(a.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    """GPT-2 without biases; embedding and output share a matrix."""

    def __init__(self, types: int):
        super().__init__()
        self.embed, self.position = nn.Embedding(types, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(*(Block() for _ in range(N_LAYER)))
        self.norm = nn.LayerNorm(D, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    weight, 0.0, 0.02 / (2 * N_LAYER) ** 0.5 if last else 0.02
                )

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next tokens."""
        x_BTD = self.embed(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        return self.norm(self.blocks(x_BTD)) @ self.embed.weight.T


def nats(model: GPT, tokens: torch.Tensor) -> float:
    """Returns the mean loss of all whole blocks of a split."""
    count = (len(tokens) - 1) // T
    x, y = (tokens[i : i + count * T].view(count, T) for i in (0, 1))
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum")
            for a, b in zip(x.split(64), y.split(64), strict=True)
        ]
    return float(sum(losses) / (count * T))


def rate(step: int, steps: int) -> float:
    """Returns the learning rate: linear warm-up, then cosine decay to MIN_LR."""
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / max(steps - WARMUP, 1)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * done)) * (LR - MIN_LR)


def learn(
    train: np.ndarray, valid: np.ndarray, types: int, steps: int, eval_every: int
) -> Curve:
    """Trains a model and returns its curve; `train` and `valid` hold tokens."""
    torch.manual_seed(1337)
    train_T, valid_T = (
        torch.tensor(split.astype(np.int64)) for split in (train, valid)
    )
    model = GPT(types)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LR, (0.9, 0.99), weight_decay=0.1)
    curve, seconds = [], 0.0
    for step in range(steps):
        began = time.perf_counter()
        starts = torch.randint(len(train_T) - T, (B,))
        block = torch.stack([train_T[i : i + T + 1] for i in starts])
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        logits = model(block[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds += time.perf_counter() - began
        if (step + 1) % eval_every == 0 or step + 1 == steps:
            curve.append((step + 1, seconds, nats(model, valid_T)))
    return curve
