"""The strategy: how one step's gradients travel, as Fleet names it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mpifleet.errors import ConfigError
from mpifleet.strategy_build import BuildStrategy, ExecutionStrategy, FleetDescConfigs
from mpifleet.strategy_configs import (
    AdaptiveLocalSGDConfigs,
    AMPConfigs,
    ASyncConfigs,
    DGCConfigs,
    FsClientParam,
    GradientMergeConfigs,
    GradientScaleConfigs,
    HybridConfigs,
    LambConfigs,
    LarsConfigs,
    LocalSGDConfigs,
    PipelineConfigs,
    QATConfigs,
    RecomputeConfigs,
    ShardingConfigs,
    TensorParallelConfigs,
    TrainerDescConfigs,
)
from mpifleet.strategy_fields import FieldGroup, Nested, Status
from mpifleet.strategy_file import read_mapping, write_mapping
from mpifleet.strategy_kinds import choice, flag, integer, number
from mpifleet.strategy_rules import check_together

__all__ = ["BuildStrategy", "DistributedStrategy", "ExecutionStrategy"]

Self = TypeVar("Self", bound="DistributedStrategy")

WORKS, NOT_YET = Status.WORKS, Status.NOT_AVAILABLE

_OLDER_NAMES = {
    "thread_num": ["execution_strategy.num_threads"],
    "micro_batch": ["pipeline_configs.micro_batch_size"],
}

_COLLECTIVE = "it acts in collective jobs only"
_CUDNN = "torch.backends.cudnn holds PyTorch's own switches"


class DistributedStrategy(FieldGroup):
    """Every setting of a job; each is checked when it is set.

    Setting raises ConfigError for an unknown name, a wrong type or a value out of range, and
    NotAvailable for a feature that this version lacks. A configs dict is laid over its defaults.
    Lists are read as tuples. docs/strategy.md lists all fields.
    """

    title = "strategy"

    a_sync = flag(
        True,
        WORKS,
        "Parameter-server jobs: True applies each worker's push as it comes (async), "
        "False applies the mean over the workers once per step (sync).",
    )
    dense_sync = flag(
        False,
        WORKS,
        "Hybrid: with a_sync, rows change with each push as it comes, dense parameters by the mean "
        "over the workers once per step, as in sync mode. mpifleet's own.",
    )
    a_sync_configs = Nested(ASyncConfigs, "Parameter-server exchange, tuned.")

    nonfinite = choice(
        "raise",
        WORKS,
        "What a server does with a gradient that holds NaN or infinity: end the job, or leave "
        "that push out and count it. mpifleet's own.",
        of=("raise", "skip"),
    )
    table_home = choice(
        "auto",
        WORKS,
        "Where tables live: node (shared memory of the server's node), world (one window over "
        "all ranks), or auto, which a self-test decides. mpifleet's own.",
        of=("auto", "node", "world"),
    )
    pull_ahead = integer(
        0,
        WORKS,
        "Batches whose rows are pulled before their turn, in loops over fleet.pull_ahead(...); "
        "a_sync only: in sync mode such rows would miss an update. mpifleet's own.",
        low=0,
        high=1000,
    )
    stall_report_s = number(
        60.0,
        WORKS,
        "Seconds without progress after which the missing ranks are reported; less than "
        "stall_end_s. mpifleet's own.",
        above=0.0,
    )
    stall_end_s = number(
        600.0,
        WORKS,
        "Seconds without progress after which the job is ended. mpifleet's own.",
        above=0.0,
    )
    preemptible = flag(
        False,
        WORKS,
        "SIGTERM and SIGUSR2 do not end the job: fleet.preempted() says at a step boundary that "
        "one has come, and the script saves and exits. mpifleet's own.",
    )
    mailbox_mib = integer(
        192,
        WORKS,
        "Most window memory per server for gradients on their way, in MiB. mpifleet's own.",
        low=1,
        high=240,
    )

    auto = flag(False, NOT_YET, "Let the framework choose the settings.")
    elastic = flag(False, NOT_YET, "Ranks may come and go.")
    heter_ccl_mode = flag(False, NOT_YET, "Collective calls over unlike devices.")
    is_fl_ps_mode = flag(False, NOT_YET, "Federated learning over parameter servers.")
    with_coordinator = flag(False, NOT_YET, "A coordinator for federated learning.")
    split_data = flag(True, NOT_YET, "Split data over data-parallel ranks.")
    adam_d2sum = flag(
        True, NOT_YET, "Adam of Paddle's dense tables keeps d2sum.", other_default="False"
    )
    fleet_desc_configs = Nested(FleetDescConfigs, "Sparse tables of Paddle's servers.")
    trainer_desc_configs = Nested(TrainerDescConfigs, "Dumps and reports of Paddle's trainers.")
    fs_client_param = Nested(FsClientParam, "Remote file system.")

    sync_nccl_allreduce = flag(
        True, NOT_YET, "Collective: each communication thread waits.", because=_COLLECTIVE
    )
    nccl_comm_num = integer(1, NOT_YET, "Collective: communicators.", low=1, because=_COLLECTIVE)
    use_hierarchical_allreduce = flag(
        False, NOT_YET, "Collective: sum inside nodes, then between them."
    )
    hierarchical_allreduce_inter_nranks = integer(
        1, NOT_YET, "Collective: ranks per lower group.", low=1
    )
    sync_batch_norm = flag(False, NOT_YET, "Batch statistics over all ranks.")
    fuse_all_reduce_ops = flag(
        True, NOT_YET, "Collective: sum gradients in groups.", because=_COLLECTIVE
    )
    fuse_grad_size_in_MB = integer(
        32, NOT_YET, "Collective: MB of gradients per group.", low=1, because=_COLLECTIVE
    )
    fuse_grad_size_in_TFLOPS = integer(
        20,
        NOT_YET,
        "Collective: most layers per group.",
        low=1,
        other_default="50",
        because=_COLLECTIVE,
    )
    fuse_grad_size_in_num = integer(
        8, NOT_YET, "Collective: most gradients per group.", low=1, because=_COLLECTIVE
    )
    last_comm_group_size_MB = number(
        1.0, NOT_YET, "Collective: MB of the last group.", above=0.0, because=_COLLECTIVE
    )
    find_unused_parameters = flag(False, NOT_YET, "Collective: allow parameters without gradient.")
    without_graph_optimization = flag(False, NOT_YET, "Collective: leave the graph as it is.")
    calc_comm_same_stream = flag(False, NOT_YET, "Collective: one stream for all work.")
    fp16_allreduce = flag(False, NOT_YET, "Collective: sum in half precision.")
    fuse_grad_merge = flag(False, NOT_YET, "Merge gradients in fused memory.")
    gradient_scale_configs = Nested(GradientScaleConfigs, "Factor of the gradients.")

    cudnn_exhaustive_search = flag(
        True, NOT_YET, "Try all convolutions.", other_default="False", because=_CUDNN
    )
    conv_workspace_size_limit = integer(
        4000, NOT_YET, "MB of work space.", low=1, other_default="512", because=_CUDNN
    )
    cudnn_batchnorm_spatial_persistent = flag(
        True,
        NOT_YET,
        "Persistent batch normalisation.",
        other_default="False",
        because=_CUDNN,
    )

    amp = flag(
        False,
        NOT_YET,
        "Mixed precision. torch.autocast with bfloat16 works in the script; torch.amp.GradScaler "
        "is refused: it unscales dense gradients only, those of table rows would keep the scale.",
    )
    amp_configs = Nested(AMPConfigs, "Mixed precision and loss scaling.")
    recompute = flag(False, NOT_YET, "Compute activations again in the backward pass.")
    recompute_configs = Nested(RecomputeConfigs, "Which activations are kept.")
    gradient_merge = flag(False, NOT_YET, "Several backward passes per exchange.")
    gradient_merge_configs = Nested(GradientMergeConfigs, "How many.")
    lars = flag(False, NOT_YET, "Layer-wise rates over momentum.")
    lars_configs = Nested(LarsConfigs, "Their constants.")
    lamb = flag(False, NOT_YET, "Layer-wise rates over Adam.")
    lamb_configs = Nested(LambConfigs, "Their constants.")
    dgc = flag(False, NOT_YET, "Deep gradient compression.")
    dgc_configs = Nested(DGCConfigs, "Its ramp and sparsity.")
    localsgd = flag(False, NOT_YET, "Local steps between averages.")
    localsgd_configs = Nested(LocalSGDConfigs, "How many.")
    adaptive_localsgd = flag(False, NOT_YET, "Local steps, their number from the loss.")
    adaptive_localsgd_configs = Nested(AdaptiveLocalSGDConfigs, "The first number.")
    pipeline = flag(False, NOT_YET, "Layers spread over ranks.")
    pipeline_configs = Nested(PipelineConfigs, "Micro-batches and their order.")
    sharding = flag(False, NOT_YET, "Optimizer states spread over ranks.")
    sharding_configs = Nested(ShardingConfigs, "How they are cut.")
    tensor_parallel = flag(False, NOT_YET, "Tensors spread over ranks.")
    tensor_parallel_configs = Nested(TensorParallelConfigs, "Over how many.")
    hybrid_configs = Nested(HybridConfigs, "Degrees of combined parallelism.")
    asp = flag(False, NOT_YET, "Keep pruned weights at zero.")
    qat = flag(False, NOT_YET, "Train for quantized inference.")
    qat_configs = Nested(QATConfigs, "Bits and ranges.")
    semi_auto = flag(False, NOT_YET, "Parallelism from the user's marks.")
    auto_search = flag(False, NOT_YET, "Search for a way to spread the model.")

    build_strategy = Nested(BuildStrategy, "How Paddle rewrites a graph.")
    execution_strategy = Nested(ExecutionStrategy, "How Paddle's executor runs it.")

    @property
    def mode(self) -> str:
        """The exchange that a_sync and dense_sync ask for: "sync", "hybrid" or "async"."""
        if not self.a_sync:
            return "sync"
        return "hybrid" if self.dense_sync else "async"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fields that differ from their defaults to a YAML file, in one piece.

        Raises ConfigError naming the path where no such file can be written.
        """
        header = "# mpifleet strategy: the fields that differ from their defaults.\n"
        write_mapping(path, self.differences(), f"{header}# mode: {self.mode}")

    def load(self: Self, path: str | os.PathLike[str]) -> Self:
        """Take every field from a YAML file (defaults where it names none) and return self.

        Raises ConfigError or NotAvailable naming file and field; then nothing has changed.
        """
        values = read_mapping(Path(path))
        try:
            self.replace(values)
        except ConfigError as error:
            raise type(error)(f"{path}: {error}") from None
        return self

    def save_to_prototxt(self, path: str) -> None:
        """Refused: strategies are YAML files here."""
        raise ConfigError(f"{path}: strategies are kept as YAML; use strategy.save(path)")

    def load_from_prototxt(self, path: str) -> None:
        """Refused: strategies are YAML files here."""
        raise ConfigError(f"{path}: strategies are kept as YAML; use strategy.load(path)")

    def __repr__(self) -> str:
        changed = list(_leaves(self.differences()))
        lines = [f"DistributedStrategy, {len(changed)} field(s) differ from the defaults"]
        width = max((len(name) for name, _ in changed), default=0)
        defaults = dict(_leaves(type(self)().to_dict()))
        lines += [f"  {n:<{width}}  {v!r}  (default {defaults[n]!r})" for n, v in changed]
        return "\n".join([*lines, f"mode: {self.mode}"])

    def _check_together(self, values: Mapping[str, Any]) -> None:
        check_together(values)

    def _unknown(self, name: object) -> ConfigError:
        if name == "mode":
            return ConfigError(
                "strategy.mode follows from strategy.a_sync and dense_sync; set these"
            )
        places: dict[str, list[str]] = {}
        for place, _ in _leaves(type(self)().to_dict()):
            places.setdefault(place.rpartition(".")[2], []).append(place)
        places.update({field: [field] for field in self.fields})
        places.update(_OLDER_NAMES)
        exact = [str(name)] if name in places else []
        near = exact or difflib.get_close_matches(str(name), places, n=3)
        found = [place for leaf in near for place in places[leaf]]
        hint = f"did you mean {' or '.join(found)}?" if found else "docs/strategy.md lists all"
        return ConfigError(f"strategy has no field {name!r}; {hint}")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that is not itself a dict, with its dotted name."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
