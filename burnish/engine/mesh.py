"""How the ranks of an engine lie: data parallel x sequence parallel.

Rank ``dp_rank * sp_size + sp_rank``: the ranks of a group that shares tokens are neighbours, so they share a node wherever
the size divides its workers. Weights, gradients and optimizer state are split over all ranks, as without groups.
"""

from dataclasses import dataclass

from burnish.engine import ranks
from burnish.model.sequence_parallel import SequenceParallel
from burnish.utils.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """This rank's place.

    Attributes:
        dp_size, dp_rank: data-parallel groups, each with rows of its own, and which of them this rank is in.
        sequence_parallel: the ranks that share the tokens of these rows; None where each rank has rows of its own.
    """

    dp_size: int
    dp_rank: int
    sequence_parallel: SequenceParallel | None

    @property
    def sp_size(self) -> int:
        """Ranks that share a row's tokens."""
        return 1 if self.sequence_parallel is None else self.sequence_parallel.size

    @property
    def sp_rank(self) -> int:
        """This rank among them."""
        return 0 if self.sequence_parallel is None else self.sequence_parallel.rank

    @property
    def speaks(self) -> bool:
        """Whether this rank stands for its group, whose ranks all know the same rows, where rows are counted."""
        return self.sp_rank == 0


def make_mesh(sp_size: int, device_type: str) -> Mesh:
    """Groups of ``sp_size`` neighbours; all ranks call it together.

    Args:
        device_type: where the tokens lie that they exchange.

    Raises:
        ConfigError: the ranks do not divide into such groups.
    """
    world, rank = ranks.world_size(), ranks.rank()
    if world % sp_size:
        sizes = [str(size) for size in range(1, world + 1) if world % size == 0]
        raise ConfigError(
            f"ulysses_sequence_parallel_size={sp_size} does not divide the number of workers, which is {world}. Sizes that "
            f"work: {', '.join(sizes)}."
        )
    if sp_size == 1:
        return Mesh(world, rank, None)
    group = ranks.groups([range(start, start + sp_size) for start in range(0, world, sp_size)], device_type)
    return Mesh(world // sp_size, rank // sp_size, SequenceParallel(group, sp_size, rank % sp_size))
