"""CTR-DNN on the parameter server of PaddlePaddle 2.6.2: one process of its job.

    python -m paddle.distributed.launch --server_num=1 --trainer_num=1 \
        benchmarks/peers/paddle_ctr.py --samples train.txt --out figures.json

Started for servers and trainers alike by Paddle's launcher, in the environment of `make peers`
(benchmarks/paddle_job.py does both and ends the launcher, which may hang after the trainer's end).
The trainer writes one JSON object to --out.  It reads MultiSlot text (benchmarks/multislot.py)
inside the timing, which is that of train_from_dataset alone.  Only Paddle's public names are used.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import paddle
from paddle.distributed import QueueDataset, fleet

NUM_DENSE, NUM_SLOTS = 13, 26
NUM_ROWS, DIM, WIDTHS = 1_000_001, 10, (400, 400, 400)
INIT_SCALE = 0.01


def main():
    """Serve, or train one epoch and write what was measured."""
    options = parse()
    paddle.enable_static()
    if options.read_alone:
        write(options.out, read_alone(options))
        return
    paddle.seed(options.seed)
    if options.alone:
        inputs, loss, counts = build(options.auc, options.embedding)
        paddle.optimizer.Adam(learning_rate=1e-3, lazy_mode=True).minimize(loss)
        write(options.out, train(options, inputs, counts))
        return
    fleet.init(fleet.PaddleCloudRoleMaker(is_collective=False))
    inputs, loss, counts = build(options.auc, options.embedding)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    adam = paddle.optimizer.Adam(learning_rate=1e-3, lazy_mode=True)
    fleet.distributed_optimizer(adam, strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    write(options.out, train(options, inputs, counts))
    # The figures are written: whoever started the job may end it by force.
    fleet.stop_worker()


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", required=True)
    parser.add_argument("--held-out", help="held-out samples, for --auc")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--auc", action="store_true", help="count AUC too, also while training")
    parser.add_argument("--embedding", choices=["plain", "sparse"], default="plain")
    parser.add_argument("--alone", action="store_true", help="no job: one process trains")
    parser.add_argument("--read-alone", action="store_true", help="no job: read the text only")
    return parser.parse_args()


def data_inputs():
    """Variables in the order of the text: dense, ids of 26 slots, label."""
    dense = paddle.static.data("dense", [None, NUM_DENSE], "float32")
    slots = [
        paddle.static.data(f"C{slot}", [None, 1], "int64", lod_level=1)
        for slot in range(1, NUM_SLOTS + 1)
    ]
    return dense, slots, paddle.static.data("label", [None, 1], "int64")


def build(with_auc, kind):
    """The inputs, the loss, and the variables that count for an AUC (positives, negatives)."""
    dense, slots, label = data_inputs()
    table = paddle.ParamAttr(
        "slots", initializer=paddle.nn.initializer.Uniform(-INIT_SCALE, INIT_SCALE)
    )
    layer = look_up_sparse if kind == "sparse" else look_up
    hidden = paddle.concat([*(layer(ids, table) for ids in slots), dense], axis=1)
    for number, width in enumerate(WIDTHS):
        hidden = linear(hidden, width, f"fc{number}", activation="relu")
    predicted = linear(hidden, 2, "out", activation="softmax")
    loss = paddle.mean(
        paddle.nn.functional.cross_entropy(predicted, label, use_softmax=False, reduction="none")
    )
    counts = None
    if with_auc:
        _, _, states = paddle.static.auc(predicted, label)
        counts = states[2:4]
    return [dense, *slots, label], loss, counts


def look_up(ids, table):
    """Rows of one slot, [batch, DIM]."""
    rows = paddle.static.nn.embedding(ids, [NUM_ROWS, DIM], is_sparse=True, param_attr=table)
    return paddle.reshape(rows, [-1, DIM])


def look_up_sparse(ids, table):
    """The same by the layer for tables that grow."""
    rows = paddle.static.nn.sparse_embedding(ids, [NUM_ROWS, DIM], param_attr=table)
    return paddle.reshape(rows, [-1, DIM])


def linear(inputs, width, name, activation):
    """A full layer whose weights start normal with standard deviation 1 / sqrt(fan_in)."""
    weight = paddle.ParamAttr(
        f"{name}.w",
        initializer=paddle.nn.initializer.Normal(0.0, 1.0 / math.sqrt(inputs.shape[1])),
    )
    bias = paddle.ParamAttr(f"{name}.b", initializer=paddle.nn.initializer.Constant(0.0))
    return paddle.static.nn.fc(
        inputs, width, weight_attr=weight, bias_attr=bias, activation=activation
    )


def open_dataset(options, path, inputs):
    """Paddle's streaming reader over one text file."""
    dataset = QueueDataset()
    dataset.init(
        batch_size=options.batch_size,
        thread_num=options.threads,
        pipe_command="cat",
        use_var=inputs,
    )
    dataset.set_filelist([path])
    return dataset


def count_lines(path):
    """Samples in a text file."""
    with open(path, "rb") as stream:
        return sum(1 for _ in stream)


def train(options, inputs, counts):
    """One epoch; the figures of it."""
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    if not options.alone:
        fleet.init_worker()
    program = paddle.static.default_main_program()
    dataset = open_dataset(options, options.samples, inputs)
    start = time.perf_counter()
    executor.train_from_dataset(program, dataset)
    seconds = time.perf_counter() - start
    samples = count_lines(options.samples)
    figures = {
        "samples": samples,
        "seconds": seconds,
        "samples_per_s": samples / seconds,
        "threads": options.threads,
        "cpu_num": os.environ.get("CPU_NUM"),
    }
    if counts is not None:
        figures["progressive_auc"] = area(*(value_of(count) for count in counts))
        if options.held_out:
            figures["auc"] = held_out(options, executor, program, inputs, counts)
    return figures


def held_out(options, executor, program, inputs, counts):
    """AUC of the held-out samples."""
    for count in counts:
        tensor = tensor_of(count)
        tensor.set(np.zeros_like(np.array(tensor)), paddle.CPUPlace())
    executor.infer_from_dataset(program, open_dataset(options, options.held_out, inputs))
    positives, negatives = (value_of(count) for count in counts)
    return area(positives, negatives)


def tensor_of(variable):
    """What a persistable variable holds."""
    return paddle.static.global_scope().find_var(variable.name).get_tensor()


def value_of(variable):
    """The same as an array."""
    return np.array(tensor_of(variable)).ravel()


def area(positives, negatives):
    """Area under the ROC curve of counts per bucket, lowest probability first."""
    above = np.cumsum(positives[::-1])
    twice = np.sum(negatives[::-1] * (2.0 * above - positives[::-1]))
    return float(twice / (2.0 * positives.sum() * negatives.sum()))


def read_alone(options):
    """The reader without a model: every input is taken, one number is made of the labels."""
    dense, slots, label = data_inputs()
    paddle.mean(paddle.cast(label, "float32"))
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    dataset = open_dataset(options, options.samples, [dense, *slots, label])
    start = time.perf_counter()
    executor.train_from_dataset(paddle.static.default_main_program(), dataset)
    seconds = time.perf_counter() - start
    samples = count_lines(options.samples)
    return {"samples": samples, "seconds": seconds, "samples_per_s": samples / seconds}


def write(path, figures):
    """One JSON object, whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(figures))
    unfinished.replace(path)


if __name__ == "__main__":
    main()
