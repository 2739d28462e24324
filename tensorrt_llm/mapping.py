"""Who does what among the ranks: the fields of TensorRT-LLM's `Mapping`, without its unused
corners."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mapping:
    """Position of one rank in the parallel layout.

    Ranks are ordered node by node (`gpus_per_node` each). Only tensor parallelism is served by this
    project; the other sizes exist so that code and routing read the same names as TensorRT-LLM's.

    Raises:
        ValueError: when the sizes do not multiply to `world_size` or a rank lies outside of it.
    """

    world_size: int = 1
    rank: int = 0
    gpus_per_node: int = 8
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    moe_cluster_size: int = 1
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    enable_attention_dp: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_ep_size", 1 if self.moe_ep_size < 1 else self.moe_ep_size)
        if self.moe_tp_size < 1:
            object.__setattr__(self, "moe_tp_size", self.tp_size // self.moe_ep_size)
        sizes = self.tp_size * self.pp_size * self.cp_size
        if sizes != self.world_size:
            raise ValueError(
                f"tp_size {self.tp_size} x pp_size {self.pp_size} x cp_size {self.cp_size} "
                f"= {sizes}, but world_size is {self.world_size}"
            )
        if self.moe_tp_size * self.moe_ep_size * self.moe_cluster_size != self.tp_size:
            raise ValueError(
                f"moe_tp_size {self.moe_tp_size} x moe_ep_size {self.moe_ep_size} "
                f"x moe_cluster_size {self.moe_cluster_size} must equal tp_size {self.tp_size}"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.world_size})")
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node {self.gpus_per_node} must be at least 1")

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def tp_group(self) -> list[int]:
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tp_size))

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank // self.moe_ep_size

    @property
    def moe_ep_rank(self) -> int:
        return self.tp_rank % self.moe_ep_size

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp_size * self.cp_size)

    @property
    def local_rank(self) -> int:
        return self.rank % self.gpus_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.gpus_per_node

    def has_tp(self) -> bool:
        return self.tp_size > 1

    def is_multi_node(self) -> bool:
        return self.world_size > self.gpus_per_node
