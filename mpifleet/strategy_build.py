"""BuildStrategy, ExecutionStrategy and the table accessor: Paddle's own machinery, by name."""

from __future__ import annotations

from mpifleet.strategy_fields import Configs, FieldGroup, Status
from mpifleet.strategy_kinds import flag, floats, integer, number, text

NOT_YET, NO_EFFECT = Status.NOT_AVAILABLE, Status.NO_EFFECT

_FUSE = "PyTorch fuses operators by torch.compile(model)"
_EAGER = "PyTorch runs operators in the script's order, with or without it"
_EXECUTOR = "PyTorch has no executor of graphs; torch.set_num_threads sets the threads"
_ACCESSOR = "size, width and rule of a sparse table come from SparseEmbedding and the optimizer"


class BuildStrategy(FieldGroup):
    """How Paddle rewrites a graph before it runs.

    Values that ask for what PyTorch does anyway are kept and have no effect, with a warning;
    values that ask for more raise NotAvailable.
    """

    title = "build_strategy"
    enable_sequential_execution = flag(
        False, NO_EFFECT, "Run operators in the order of definition.", because=_EAGER
    )
    fuse_elewise_add_act_ops = flag(False, NOT_YET, "Fuse addition and activation.", because=_FUSE)
    fuse_bn_act_ops = flag(
        False, NOT_YET, "Fuse batch normalisation and activation.", because=_FUSE
    )
    fuse_relu_depthwise_conv = flag(
        False, NOT_YET, "Fuse ReLU and depthwise convolution.", because=_FUSE
    )
    fuse_broadcast_ops = flag(False, NOT_YET, "Fuse broadcasts.")
    fuse_all_optimizer_ops = flag(
        False,
        NOT_YET,
        "Fuse the updates of all parameters.",
        because="servers update all dense parameters as one flat table anyway",
    )
    enable_inplace = flag(
        False, NOT_YET, "Outputs take the memory of inputs.", because="use inplace=True in layers"
    )
    enable_backward_optimizer_op_deps = flag(
        True, NO_EFFECT, "Updates wait for the whole backward pass.", because=_EAGER
    )
    cache_runtime_context = flag(
        False, NO_EFFECT, "Keep the operators' contexts between steps.", because=_EXECUTOR
    )
    fuse_bn_add_act_ops = flag(
        True, NOT_YET, "Fuse batch normalisation, addition and activation.", because=_FUSE
    )
    enable_auto_fusion = flag(False, NOT_YET, "Fuse chains of operators.", because=_FUSE)
    enable_addto = flag(False, NOT_YET, "Add gradients in place.")
    fix_op_run_order = flag(False, NO_EFFECT, "Run operators in one fixed order.", because=_EAGER)
    allow_cuda_graph_capture = flag(False, NOT_YET, "Capture steps as CUDA graphs.")
    reduce_strategy = integer(0, NOT_YET, "0: all-reduce, 1: reduce and broadcast.")
    fuse_gemm_epilogue = flag(
        False, NOT_YET, "Fuse matrix product, bias and activation.", because=_FUSE
    )
    debug_graphviz_path = text("", NOT_YET, "File for a drawing of the graph.")


class ExecutionStrategy(FieldGroup):
    """How Paddle's executor runs a graph: kept, without effect, with a warning."""

    title = "execution_strategy"
    num_threads = integer(1, NO_EFFECT, "Threads that run operators.", low=1, because=_EXECUTOR)
    num_iteration_per_drop_scope = integer(
        10, NO_EFFECT, "Steps between two clean-ups of temporaries.", low=1, because=_EXECUTOR
    )
    num_iteration_per_run = integer(
        3,
        NO_EFFECT,
        "Steps per call of the executor.",
        low=1,
        because=_EXECUTOR,
        other_default="1",
    )
    use_thread_barrier = flag(
        False,
        NO_EFFECT,
        "Threads wait for each other (Paddle: True on servers).",
        because=_EXECUTOR,
    )


class FleetDescConfigs(Configs):
    """Sparse tables of Paddle's servers: storage, admission, eviction and update rule."""

    title = "strategy.fleet_desc_configs"
    shard_num = integer(1000, NOT_YET, "Shards per table.", because=_ACCESSOR)
    enable_sparse_table_cache = flag(True, NOT_YET, "Keep frequent rows apart.")
    sparse_table_cache_rate = number(0.00055, NOT_YET, "Share of rows kept apart.")
    sparse_table_cache_file_num = integer(16, NOT_YET, "Files of the rows kept apart.")
    compress_in_save = flag(False, NOT_YET, "Compress saved tables.")
    fea_dim = integer(11, NOT_YET, "Values per row.", because=_ACCESSOR)
    embedx_dim = integer(8, NOT_YET, "Values of the long part of a row.", because=_ACCESSOR)
    embedx_threshold = integer(10, NOT_YET, "Score from which a row has its long part.")
    nonclk_coeff = number(0.1, NOT_YET, "Weight of shows without click in the score.")
    click_coeff = number(1.0, NOT_YET, "Weight of clicks in the score.")
    base_threshold = number(1.5, NOT_YET, "Score from which a row is in the base save.")
    delta_threshold = number(0.25, NOT_YET, "Score from which a row is in the delta save.")
    delta_keep_days = number(16.0, NOT_YET, "Days for which a row is in the delta save.")
    show_click_decay_rate = number(0.98, NOT_YET, "Daily decay of shows and clicks.")
    delete_threshold = number(0.8, NOT_YET, "Score below which a row is removed.")
    delete_after_unseen_days = number(30.0, NOT_YET, "Days after which an unseen row is removed.")
    ssd_unseenday_threshold = integer(1, NOT_YET, "Days after which an unseen row goes to disk.")
    show_scale = flag(True, NOT_YET, "Scale gradients by shows.")
    sgd_rule = text("adagrad", NOT_YET, "Update rule.", because=_ACCESSOR)
    learning_rate = number(
        0.05, NOT_YET, "Rate.", other_default="0.001 for adam", because=_ACCESSOR
    )
    initial_range = number(1e-4, NOT_YET, "Range of first values.", because=_ACCESSOR)
    initial_g2sum = number(3.0, NOT_YET, "First sum of squares of adagrad.", because=_ACCESSOR)
    beta1 = number(0.9, NOT_YET, "First decay of adam.", because=_ACCESSOR)
    beta2 = number(0.999, NOT_YET, "Second decay of adam.", because=_ACCESSOR)
    ada_epsilon = number(1e-8, NOT_YET, "Added to adam's denominator.", because=_ACCESSOR)
    weight_bounds = floats((-10.0, 10.0), NOT_YET, "Bounds of a value.")
