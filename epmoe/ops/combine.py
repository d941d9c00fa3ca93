"""The weighted sum of rows per token: the last stage of the MoE layer, at home and on expert ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs


def weighted_sum_ref(
    rows_ND: torch.Tensor,
    index_TJ: torch.Tensor,
    weight_TJ: torch.Tensor | None = None,
    add_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """``y[t] = round(sum_j weight[t, j] * rows[index[t, j]]) + add[t]``.

    Products and sums are float32, in ascending j, rounded once to the dtype of the rows; ``add`` is then added in
    that dtype.  A choice with index -1 is skipped: the rows it might point at are never read or multiplied.

    Args:
        rows_ND: model dtype.
        index_TJ: int32 row per (token, choice), or -1.
        weight_TJ: float32; None = all ones.
        add_TD: model dtype (the shared experts' output), or None.
    """
    tokens, choices = index_TJ.shape
    y_TD = torch.zeros(tokens, rows_ND.shape[1], dtype=torch.float32, device=rows_ND.device)
    if rows_ND.shape[0] and choices:
        part_TJD = rows_ND[index_TJ.clamp(min=0).long()].float()
        if weight_TJ is not None:
            part_TJD.mul_(weight_TJ.unsqueeze(-1))
        # An absent choice adds +0, which changes no sum that began at +0; its garbage row may hold NaN.
        part_TJD.masked_fill_((index_TJ < 0).unsqueeze(-1), 0.0)
        for j in range(choices):
            y_TD += part_TJD[:, j]
    y_TD = y_TD.to(rows_ND.dtype)
    return y_TD if add_TD is None else y_TD + add_TD


@triton.jit
def _weighted_sum_kernel(
    rows_ptr,
    index_ptr,
    weight_ptr,
    add_ptr,
    y_ptr,
    D,
    J: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program makes BD columns of one token; the J loads are independent and stay in flight together."""
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros([BD], tl.float32)
    for j in tl.static_range(J):
        row = tl.load(index_ptr + t * J + j)
        present = d < tl.where(row >= 0, D, 0)
        part = tl.load(rows_ptr + row.to(tl.int64) * D + d, mask=present, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            # A skipped choice may carry any weight, also NaN.
            part *= tl.where(row >= 0, tl.load(weight_ptr + t * J + j), 0.0)
        acc += part
    y = acc.to(y_ptr.dtype.element_ty)
    if add_ptr is not None:
        added = y.to(tl.float32) + tl.load(add_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        y = added.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + t * D + d, y, mask=d < D)


def weighted_sum_triton(
    rows_ND: torch.Tensor,
    index_TJ: torch.Tensor,
    weight_TJ: torch.Tensor | None = None,
    add_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`weighted_sum_ref` in one kernel; each output is one program's, so its bits do not depend on other tokens."""
    tokens, choices = index_TJ.shape
    hidden = rows_ND.shape[1]
    y_TD = rows_ND.new_empty((tokens, hidden))
    if tokens and hidden:
        columns = min(triton.next_power_of_2(hidden), 2048 if tokens >= 512 else 512)
        _weighted_sum_kernel[(tokens, triton.cdiv(hidden, columns))](
            rows_ND.contiguous(),
            index_TJ.contiguous(),
            None if weight_TJ is None else weight_TJ.contiguous(),
            None if add_TD is None else add_TD.contiguous(),
            y_TD,
            hidden,
            J=choices,
            BD=columns,
            num_warps=max(1, min(8, columns // 256)),
            **pdl_options(rows_ND),
        )
    return y_TD


def weighted_sum(
    rows_ND: torch.Tensor,
    index_TJ: torch.Tensor,
    weight_TJ: torch.Tensor | None = None,
    add_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`weighted_sum_ref`; the kernel on CUDA."""
    return (weighted_sum_triton if rows_ND.is_cuda else weighted_sum_ref)(rows_ND, index_TJ, weight_TJ, add_TD)
