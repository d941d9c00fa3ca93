"""The weighted sum of rows per token: the last stage of the MoE layer, at home and on expert ranks."""

from __future__ import annotations

import torch


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


weighted_sum = weighted_sum_ref
