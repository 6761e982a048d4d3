"""The groups of settings inside a strategy: one dict with fixed keys per feature of Fleet."""

from __future__ import annotations

from mpifleet.strategy_fields import Configs, Status
from mpifleet.strategy_kinds import (
    choice,
    flag,
    floats,
    integer,
    integers,
    number,
    password,
    text,
    texts,
)

WORKS, NOT_YET = Status.WORKS, Status.NOT_AVAILABLE

_MAILBOX = "gradients travel through the servers' mailbox, whose size is strategy.mailbox_mib"
_GEO = "k_steps > 0 asks for GEO; valid: -1 or 0"


class ASyncConfigs(Configs):
    """Parameter-server exchange, tuned."""

    title = "strategy.a_sync_configs"
    k_steps = integer(
        -1,
        WORKS,
        "Steps between two exchanges: -1 and 0 exchange every step, more is GEO "
        "(not available in this version).",
        low=-1,
        works_for=lambda k_steps: k_steps <= 0,
        because=_GEO,
    )
    max_merge_var_num = integer(1, NOT_YET, "Gradients merged before one send.", because=_MAILBOX)
    send_queue_size = integer(16, NOT_YET, "Gradients queued for sending.", because=_MAILBOX)
    independent_recv_thread = flag(
        False, NOT_YET, "Pull in a thread of its own.", because="dense values are pulled each step"
    )
    min_send_grad_num_before_recv = integer(
        1, NOT_YET, "Sends before one pull.", because="dense values are pulled each step"
    )
    thread_pool_size = integer(
        1, NOT_YET, "Threads that send.", because="the worker's own thread sends"
    )
    send_wait_times = integer(
        1, NOT_YET, "Waits for more gradients before one send.", because=_MAILBOX
    )
    runtime_split_send_recv = flag(
        False, NOT_YET, "Cut parameters over servers at run time.", because="tables are always cut"
    )
    launch_barrier = flag(
        True, NOT_YET, "Workers start together.", because="workers always start together"
    )
    heter_worker_device_guard = text(
        "cpu", NOT_YET, "Device of heterogeneous workers.", because="there is no such role"
    )
    lr_decay_steps = integer(
        10,
        NOT_YET,
        "Steps per decay of the server's own rate.",
        because="the rate travels with each push, so any torch scheduler works",
    )
    use_ps_gpu = integer(0, NOT_YET, "1: tables in GPU memory.", because="tables are in memory")
    staleness = integer(
        -1,
        WORKS,
        "Steps that a worker may be ahead of the slowest one (SSP); 0 is lock step, -1 no bound. "
        "With a_sync only. mpifleet's own.",
        low=-1,
    )


class DGCConfigs(Configs):
    """Deep gradient compression."""

    title = "strategy.dgc_configs"
    rampup_begin_step = integer(0, NOT_YET, "First compressed step.")
    rampup_step = integer(1, NOT_YET, "Steps over which sparsity grows.")
    sparsity = floats((), NOT_YET, "Share of values held back, per stage; empty means 0.999.")


class LocalSGDConfigs(Configs):
    """Local steps between two averages."""

    title = "strategy.localsgd_configs"
    k_steps = integer(1, NOT_YET, "Local steps between two averages.")
    begin_step = integer(1, NOT_YET, "First step of local training.")


class AdaptiveLocalSGDConfigs(Configs):
    """Local steps between two averages, chosen from the loss."""

    title = "strategy.adaptive_localsgd_configs"
    init_k_steps = integer(1, NOT_YET, "Local steps before the first average.")
    begin_step = integer(1, NOT_YET, "First step of local training.")


class LarsConfigs(Configs):
    """Layer-wise adaptive rates over momentum."""

    title = "strategy.lars_configs"
    lars_coeff = number(0.001, NOT_YET, "Trust coefficient.")
    lars_weight_decay = number(0.0005, NOT_YET, "Weight decay.")
    epsilon = number(0.0, NOT_YET, "Added to the denominator.")
    exclude_from_weight_decay = texts(NOT_YET, "Parts of names of parameters without decay.")


class LambConfigs(Configs):
    """Layer-wise adaptive rates over Adam."""

    title = "strategy.lamb_configs"
    lamb_weight_decay = number(0.01, NOT_YET, "Weight decay.")
    exclude_from_weight_decay = texts(NOT_YET, "Parts of names of parameters without decay.")


class AMPConfigs(Configs):
    """Mixed precision and loss scaling."""

    title = "strategy.amp_configs"
    init_loss_scaling = number(32768.0, NOT_YET, "First factor of the loss.")
    incr_every_n_steps = integer(1000, NOT_YET, "Finite steps before the factor grows.")
    decr_every_n_nan_or_inf = integer(2, NOT_YET, "Non-finite steps before it shrinks.")
    incr_ratio = number(2.0, NOT_YET, "Growth of the factor.")
    decr_ratio = number(0.8, NOT_YET, "Shrinking of the factor.", other_default="0.5")
    use_dynamic_loss_scaling = flag(True, NOT_YET, "Let the factor follow the gradients.")
    custom_white_list = texts(NOT_YET, "Operators that always run in half precision.")
    custom_black_list = texts(NOT_YET, "Operators that never do.")
    custom_black_varnames = texts(NOT_YET, "Variables that stay in float32.")
    use_pure_fp16 = flag(False, NOT_YET, "Half precision everywhere.")
    use_fp16_guard = flag(True, NOT_YET, "Half precision only in marked regions.")
    use_optimizer_fp16 = flag(False, NOT_YET, "Optimizer in half precision.")


class RecomputeConfigs(Configs):
    """Activations computed again in the backward pass."""

    title = "strategy.recompute_configs"
    checkpoints = texts(NOT_YET, "Names of the activations that are kept.")
    enable_offload = flag(False, NOT_YET, "Keep them in host memory.")
    checkpoint_shape = integers(NOT_YET, "Their shape, for offloading.")
    enable_tuning = flag(False, NOT_YET, "Choose them automatically.")


class GradientMergeConfigs(Configs):
    """Several backward passes per exchange."""

    title = "strategy.gradient_merge_configs"
    k_steps = integer(1, NOT_YET, "Backward passes per exchange.")
    avg = flag(True, NOT_YET, "Divide the sum by k_steps.")


class PipelineConfigs(Configs):
    """Layers spread over ranks."""

    title = "strategy.pipeline_configs"
    micro_batch_size = integer(1, NOT_YET, "Samples per micro-batch (once micro_batch).")
    accumulate_steps = integer(1, NOT_YET, "Micro-batches per step.")
    schedule_mode = choice("1F1B", NOT_YET, "Order of the passes.", of=("1F1B", "F-then-B"))
    p2p_cache_shape = flag(True, NOT_YET, "Send shapes once.")
    enable_partial_send_recv = flag(True, NOT_YET, "Send slices under tensor parallelism.")


class HybridConfigs(Configs):
    """Degrees of combined parallelism."""

    title = "strategy.hybrid_configs"
    dp_degree = integer(-1, NOT_YET, "Data-parallel copies; -1: what the others leave.")
    mp_degree = integer(1, NOT_YET, "Ranks per tensor.")
    pp_degree = integer(1, NOT_YET, "Pipeline stages.")
    sharding_degree = integer(1, NOT_YET, "Ranks per set of optimizer states.")


class TensorParallelConfigs(Configs):
    """Tensors spread over ranks."""

    title = "strategy.tensor_parallel_configs"
    tensor_parallel_degree = integer(1, NOT_YET, "Ranks per tensor.")
    tensor_init_seed = integer(-1, NOT_YET, "Seed of the first values; -1: none.")


class ShardingConfigs(Configs):
    """Optimizer states, gradients and parameters spread over ranks."""

    title = "strategy.sharding_configs"
    sharding_segment_strategy = choice(
        "segment_broadcast_MB",
        NOT_YET,
        "How the model is cut into segments.",
        of=("segment_broadcast_MB", "segment_anchors"),
    )
    segment_broadcast_MB = number(32.0, NOT_YET, "Segment size in MB.")
    segment_anchors = texts(NOT_YET, "Names at which segments end.")
    sharding_degree = integer(8, NOT_YET, "Ranks per set of states.")
    mp_degree = integer(1, NOT_YET, "Ranks per tensor.")
    dp_degree = integer(1, NOT_YET, "Data-parallel copies.")
    hybrid_dp = flag(False, NOT_YET, "Data parallelism around sharding.")
    gradient_merge_acc_step = integer(1, NOT_YET, "Backward passes per exchange.")
    optimize_offload = flag(False, NOT_YET, "States in host memory.")
    pp_allreduce_in_optimize = flag(False, NOT_YET, "Sum gradients in the optimizer's phase.")
    pp_degree = integer(1, NOT_YET, "Pipeline stages.")
    optimize_cast = flag(False, NOT_YET, "Move casts into the optimizer.")
    stage = integer(1, NOT_YET, "1: states, 2: and gradients, 3: and parameters.")


class GradientScaleConfigs(Configs):
    """Factor of the gradients before they are summed."""

    title = "strategy.gradient_scale_configs"
    scale_strategy = choice(
        "avg", NOT_YET, "Mean, sum or the user's own factor.", of=("avg", "sum", "customized")
    )
    scale_gradient = flag(False, NOT_YET, "Scale gradients instead of the loss.")


class TrainerDescConfigs(Configs):
    """What a trainer of Paddle's data sets writes and reports."""

    title = "strategy.trainer_desc_configs"
    dump_fields_path = text("", NOT_YET, "Directory for dumped values.")
    dump_fields = texts(NOT_YET, "Values dumped per sample.")
    dump_param = texts(NOT_YET, "Parameters dumped per step.")
    stat_var_names = texts(NOT_YET, "Values whose statistics are printed.")
    trainer = text("", NOT_YET, "Trainer class.")
    device_worker = text("", NOT_YET, "Worker class.")
    local_sparse = texts(NOT_YET, "Sparse parameters kept at the worker.")
    remote_sparse = texts(NOT_YET, "Sparse parameters kept at the servers.")


class FsClientParam(Configs):
    """Remote file system."""

    title = "strategy.fs_client_param"
    uri = text("", NOT_YET, "Address.", because="paths are those of the nodes' file systems")
    user = text("", NOT_YET, "User name.", because="paths are those of the nodes' file systems")
    passwd = password(NOT_YET, "Password.", because="paths are those of the nodes' file systems")
    hadoop_bin = text("", NOT_YET, "Client.", because="paths are those of the nodes' file systems")


class QATConfigs(Configs):
    """Training for quantized inference."""

    title = "strategy.qat_configs"
    channel_wise_abs_max = flag(True, NOT_YET, "One range per channel.")
    weight_bits = integer(8, NOT_YET, "Bits of weights.")
    activation_bits = integer(8, NOT_YET, "Bits of activations.")
    not_quant_pattern = texts(NOT_YET, "Parts of names that stay as they are.")
    algo = text("", NOT_YET, "Algorithm.")
