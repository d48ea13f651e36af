"""The integration of Ray, with Ray itself: a worker that is used again begins at the floor. Run by hand: Ray is 80 MB.

On the stand-in, with ray==2.60.0, jsonschema, msgpack, protobuf, attrs, referencing, rpds-py and jsonschema-specifications on
the path. Needs no account and no network; takes some 20 s.
"""

import os
import sys

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import ray
import torch
from bench import main

from unhand.integrations import ray as of_ray


def train(config):
    """A task that leaves its model in a cycle."""
    model = torch.nn.Linear(1024, 1024).cuda()
    model.owner = model
    return {"loss": model(torch.zeros(config["batch"], 1024, device="cuda")).sum().detach()}


def figures():
    """Of the worker that runs this."""
    return os.getpid(), torch.cuda.memory_reserved()


def numbers(config):
    """The plain task, with a result that can be sent."""
    return {name: float(value) for name, value in train(config).items()}


def check_a_worker_that_is_used_again():
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False)
    try:
        ask = ray.remote(figures)
        assert ray.get(ray.remote(numbers).remote({"batch": 2}))["loss"] == 0.0
        worker, before = ray.get(ask.remote())
        assert before > 4 << 20, "the plain task leaves its model"
        assert ray.get(ray.remote(of_ray.trainable(train)).remote({"batch": 2})) == {"loss": 0.0}
        assert ray.get(ask.remote()) == (worker, 0)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(globals())
