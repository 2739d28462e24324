"""Targets: one model on one machine layout, with its own forward and kernels. `_router_index` says
which deployment gets one; docs/modeling_v2.md is the tour."""
