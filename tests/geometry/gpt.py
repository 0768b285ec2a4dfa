"""A small GPT with AdamW, trained in any parallel layout so that the layout need not change a single bit.

Gradients are summed over the micro-batches in their order: for each of them all data-parallel ranks go through one
backward pass to which all but one add zeros. So layouts with the same degree of tensor parallelism do the same
arithmetic; another degree splits the sums in matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import tierckpt

VOCABULARY = 37
CONTEXT = 12
WIDTH = 24
HEADS = 4
HIDDEN = 52  # 26 for each of two tensor-parallel ranks, so that three shards of it are uneven
BLOCKS = 4
MICRO_BATCHES = 4
BATCH = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] in and out. Of tensor-parallel ranks each has some of the heads."""
        normed = self.attention_norm(x)
        query, key, value = (
            part(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return torch.as_tensor(x + self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Some of the blocks; the first stage has the embeddings, the last one norm and head."""

    def __init__(self, blocks: range) -> None:
        super().__init__()
        self.first, self.last = blocks.start == 0, blocks.stop == BLOCKS
        if self.first:
            self.token = nn.Embedding(VOCABULARY, WIDTH)
            self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in blocks})
        if self.last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or what the stage before gave; logits or what the next stage takes."""
        if self.first:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        if self.last:
            x = self.head(self.norm(x))
        return x


class Layout(NamedTuple):
    """Ranks of each kind: pipeline stages × data-parallel × tensor-parallel."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp


class Job:
    """What one rank holds, and its training loop."""

    def __init__(self, rank: int, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.rank = rank
        self.stage, self.replica = rank // (layout.dp * layout.tp), rank // layout.tp % layout.dp
        per_stage = BLOCKS // layout.pp
        blocks = range(self.stage * per_stage, (self.stage + 1) * per_stage)
        self.model = GPT(blocks)
        _initialize(self.model, seed)
        self._parallelize()
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        # One operation cannot take parameters of several meshes.
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.steps = 0

    def _parallelize(self) -> None:
        if self.layout.world == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh(
            "cpu", (self.layout.pp, self.layout.dp, self.layout.tp), mesh_dim_names=("pp", "dp", "tp")
        )
        blocks: list[Any] = list(self.model.blocks.values())
        if self.layout.tp > 1:
            columns, rows = ("query", "key", "value", "up"), ("out", "down")
            plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
            plan.update((name, RowwiseParallel()) for name in rows)
            for block in blocks:
                parallelize_module(block, mesh["tp"], plan)
        if self.layout.dp > 1:
            for module in (*blocks, self.model):
                fully_shard(module, mesh=mesh["dp"])
                # Sums, not means: all but one of the summands are zero.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "steps": self.steps,
        }

    def load(self, root: str) -> None:
        state = self.state()
        tierckpt.load(state, root)
        self.steps = state["steps"]

    def train(self, steps: int) -> list[list[float]]:
        """The losses of all micro-batches of these steps, the same on every rank."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> list[float]:
        losses = torch.zeros(MICRO_BATCHES, dtype=torch.float64)
        for number, (tokens, wanted) in enumerate(_micro_batches(self.steps)):
            mine = number % self.layout.dp == self.replica
            loss = self._pass(tokens, wanted, 1.0 if mine else 0.0)
            if loss is not None and mine and self.rank % self.layout.tp == 0:
                losses[number] = loss.double()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.steps += 1
        if self.layout.world > 1:
            torch.distributed.all_reduce(losses)  # one rank has each loss, the others 0
        found: list[float] = losses.tolist()
        return found

    def _pass(self, tokens: Tensor, wanted: Tensor, weight: float) -> Tensor | None:
        """Forward and backward; the loss, where the last stage is."""
        per_stage = self.layout.dp * self.layout.tp
        x = tokens
        if not self.model.first:
            x = torch.empty(BATCH, CONTEXT, WIDTH)
            torch.distributed.recv(x, self.rank - per_stage)
            x.requires_grad_()
        y = self.model(x)
        loss: Tensor | None = None
        if self.model.last:
            loss = functional.cross_entropy(y.flatten(0, 1), wanted.flatten())
            torch.autograd.backward(loss * weight)
        else:
            torch.distributed.send(y.detach(), self.rank + per_stage)
            gradient = torch.empty_like(y)
            torch.distributed.recv(gradient, self.rank + per_stage)
            torch.autograd.backward(y, gradient)
        if not self.model.first:
            assert x.grad is not None
            torch.distributed.send(x.grad, self.rank - per_stage)
        return None if loss is None else loss.detach()


def _initialize(model: GPT, seed: int) -> None:
    """The same values whatever stage a parameter is in; 0: nothing that training would give."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed * 10**6 + sum(map(ord, name)) * 997 + len(name))
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * 0.1 + ("norm.weight" in name) if seed else torch.zeros_like(values))


def _micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers that follow a rule with noise: something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    for _ in range(MICRO_BATCHES):
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        text = (
            start + 3 * torch.arange(CONTEXT + 1) + torch.randint(2, (BATCH, CONTEXT + 1), generator=generator)
        ) % 37
        yield text[:, :-1], text[:, 1:]
