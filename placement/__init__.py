"""Which GPU holds which expert: plans, routing traces, one cost function, solvers, and their proof.

Shape letters, as suffixes of array names (L is the number of MoE layers in this package):
T tokens, L MoE layers, K choices per token (top-k), E logical experts per layer, W ranks,
S slots of a layer over all ranks.  Maps are named by direction: ``expert_rank_LE`` is expert -> rank.
"""

__version__ = "0.1.0"
