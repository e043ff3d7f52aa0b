"""Run by test_train_loop.py with two fake devices: the losses of three steps, on one device and on both."""

import jax
from helpers import BYTES_PAIR
from jax.sharding import AxisType

from torch_dflash.pair import load_pair
from torch_dflash.train.batches import BatchPlan, Order, make_data
from torch_dflash.train.features import device_features
from torch_dflash.train.loop import train
from torch_dflash.train.pipeline import make_trainer
from torch_dflash.train.records import Answer
from torch_dflash.train.trainer import TrainPlan
from torch_dflash.train.warm_start import drafter_config

pair = load_pair(BYTES_PAIR / "target", None)
data = make_data([Answer(i, (40, 41), tuple(97 + (i * j) % 7 for j in range(20))) for i in range(8)], 32)
config = drafter_config(pair.target.config, 1, 4, 257, (1, 3))
store = device_features(pair.target, pair.params["target"], (1, 3), data)
for mesh in (None, jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
    plan = TrainPlan(compute="float32", negatives=None, learning_rate=1e-2)
    trainer, state = make_trainer(config, pair.params["target"], data, plan, mesh)
    order = Order(data, BatchPlan(rows=4, anchors=2, max_tokens=32))
    print(*(float(measures.loss) for _, measures in train(trainer, state, order, store, 3)))
