"""The embedded model in its training form: a Qwen3-MoE decoder in plain torch, its optimiser, its checkpoint names.

At this size the fastest way to train 16 experts is to compute all of them for every token as one wide MLP and scale
each expert's hidden units by its routing weight (0 where it was not chosen): two large matrix products per layer,
no sorting, the same bits on every run. What is exported is the ordinary sparse model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from epmoe.moe.router_training import balance_loss, noisy_logits, route_for_training
from epmoe.ops.router import RouterRule

RULE = RouterRule(score="softmax", renormalize=True, weight_dtype="logits")  # Qwen3-MoE's


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; ``noise`` adds the learned spread of noisy top-k gating (training only, not exported)."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 16
    top_k: int = 2
    expert_hidden: int = 48
    context: int = 1024
    noise: bool = False


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with a norm over each head of q and k before the rotary embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(shape.head_dim), RMSNorm(shape.head_dim)

    def forward(self, x_BSD: torch.Tensor, cos_SH: torch.Tensor, sin_SH: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BSD.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q, k = self.q_norm(self.q_proj(x_BSD).view(heads)), self.k_norm(self.k_proj(x_BSD).view(heads))
        q, k = rotate(q.transpose(1, 2), cos_SH, sin_SH), rotate(k.transpose(1, 2), cos_SH, sin_SH)
        v = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: torch.Tensor, cos_SH: torch.Tensor, sin_SH: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos_SH + torch.cat([-second, first], -1) * sin_SH).to(x.dtype)


class Experts(nn.Module):
    """Router and experts; weights ``gate_up [2, E, F, D]`` and ``down [E, F, D]`` (transposed when exported)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.spread = nn.Linear(shape.hidden, shape.experts, bias=False) if shape.noise else None
        self.gate_up = nn.Parameter(torch.empty(2, shape.experts, shape.expert_hidden, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.expert_hidden, shape.hidden))

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """y_TD, the balance loss, and int64 ``[E]`` choices per expert."""
        shape = self.shape
        logits_TE = self.router(x_TD)
        if self.spread is not None and self.training:
            logits_TE = noisy_logits(logits_TE, self.spread(x_TD)).to(logits_TE.dtype)
        routed = route_for_training(logits_TE, RULE, shape.top_k)
        chosen_TKE = routed.expert_TK.unsqueeze(-1) == torch.arange(shape.experts, device=x_TD.device)
        weight_TE = (chosen_TKE * routed.weight_TK.unsqueeze(-1)).sum(1)
        gate, up = functional.linear(x_TD, self.gate_up.flatten(0, 2)).chunk(2, -1)
        hidden_TN = functional.silu(gate) * up * weight_TE.to(gate.dtype).repeat_interleave(shape.expert_hidden, 1)
        load_E = chosen_TKE.sum((0, 1))
        y_TD = functional.linear(hidden_TN, self.down.flatten(0, 1).T)
        return y_TD, balance_loss(routed.prob_TE, routed.expert_TK), load_E


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(shape.hidden), RMSNorm(shape.hidden)
        self.attention, self.experts = Attention(shape), Experts(shape)

    def forward(self, x_BSD, cos_SH, sin_SH):
        x_BSD = x_BSD + self.attention(self.input_norm(x_BSD), cos_SH, sin_SH)
        y_TD, balance, load_E = self.experts(self.post_norm(x_BSD).flatten(0, 1))
        return x_BSD + y_TD.view_as(x_BSD), balance, load_E


class DemoNet(nn.Module):
    """Token ids ``[B, S + 1]`` -> (summed next-token loss in nats, mean balance loss, choices ``[L, E]``)."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        frequency = 10000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angle_SH = torch.outer(torch.arange(shape.context), frequency).repeat(1, 2)
        self.register_buffer("cos", angle_SH.cos(), persistent=False)
        self.register_buffer("sin", angle_SH.sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = name.endswith(("o_proj.weight", "down"))
                std = 0.02 / (2 * shape.layers) ** 0.5 if into_residual else 0.02
                nn.init.zeros_(parameter) if "spread" in name else nn.init.normal_(parameter, 0, std, generator)

    def forward(self, token_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_BSV, balance_L, load_LE = self.logits(token_BS[:, :-1])
        loss = functional.cross_entropy(logits_BSV.flatten(0, 1).float(), token_BS[:, 1:].flatten(), reduction="sum")
        return loss, balance_L.mean(), load_LE

    def logits(self, token_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        length = token_BS.shape[1]
        x_BSD, balances, loads = self.embed(token_BS), [], []
        for block in self.blocks:
            x_BSD, balance, load_E = block(x_BSD, self.cos[:length], self.sin[:length])
            balances.append(balance)
            loads.append(load_E)
        logits_BSV = functional.linear(self.norm(x_BSD), self.embed.weight)
        return logits_BSV, torch.stack(balances), torch.stack(loads)


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made near-orthogonal, matrix by matrix (Jordan et al., 2024), scaled to an RMS of 0.2.

    A group holds parameters whose last two dimensions are equal; an expert's matrices are stepped one by one.
    """

    def __init__(self, groups: list[dict], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = group["params"]
            gradients = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[parameter]["momentum"] for parameter in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
            updates = [update.reshape(-1, *update.shape[-2:]) for update in updates]
            rows, columns = updates[0].shape[-2:]
            steps = orthogonal(torch.cat(updates)).float() * (0.2 * max(rows, columns) ** 0.5)
            steps = [step.view_as(p) for p, step in zip(parameters, steps.split([len(u) for u in updates]))]
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, steps, alpha=-group["lr"])


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration towards ``U @ V.T`` of each matrix's singular value decomposition, in bfloat16."""
    x = matrices.bfloat16()
    x = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


def optimizers(net: DemoNet, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding, routers and norms."""
    by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
    others = []
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1 and "blocks" in name and "router" not in name and "spread" not in name:
            by_shape.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
        else:
            others.append(parameter)
    return [
        Muon([{"params": parameters} for parameters in by_shape.values()], lr, weight_decay=0.1),
        torch.optim.AdamW(others, lr, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda),
    ]


def exported(net: DemoNet) -> dict[str, torch.Tensor]:
    """The weights under Qwen3-MoE's checkpoint names, bfloat16; the head is the embedding."""
    tensors = {"model.embed_tokens.weight": net.embed.weight, "model.norm.weight": net.norm.weight}
    for i, block in enumerate(net.blocks):
        at = f"model.layers.{i}."
        tensors[at + "input_layernorm.weight"] = block.input_norm.weight
        tensors[at + "post_attention_layernorm.weight"] = block.post_norm.weight
        for name, parameter in block.attention.named_parameters():
            tensors[f"{at}self_attn.{name}"] = parameter
        tensors[at + "mlp.gate.weight"] = block.experts.router.weight
        for e in range(net.shape.experts):
            tensors[f"{at}mlp.experts.{e}.gate_proj.weight"] = block.experts.gate_up[0, e]
            tensors[f"{at}mlp.experts.{e}.up_proj.weight"] = block.experts.gate_up[1, e]
            tensors[f"{at}mlp.experts.{e}.down_proj.weight"] = block.experts.down[e].T
    return {name: tensor.detach().bfloat16().contiguous().cpu() for name, tensor in tensors.items()}


def hf_config(shape: Shape) -> dict:
    """``config.json`` of the exported model, with the keys that transformers 4 and 5 read."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.experts * shape.expert_hidden,
        "moe_intermediate_size": shape.expert_hidden,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "router_aux_loss_coef": 0.01,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
