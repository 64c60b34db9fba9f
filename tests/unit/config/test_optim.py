import re

import pytest
import yaml

from hvdtrain.cli.parser import parse_options
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import apply_values, to_yaml
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.run import Config

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be a positive number. Received: 0.0."),
        ({"warmup_steps": -1}, "warmup_steps must not be negative. Received: -1."),
        ({"base_batch": 0, "lr_scaling": "linear"}, "base_batch must be at least 1. Received: 0."),
        (
            {"lr_scaling": "linear"},
            "lr_scaling='linear' needs the batch that learning_rate=0.001 was tuned for: add base_batch.",
        ),
        ({"lr_scaling": "sqrt"}, "lr_scaling='sqrt' needs the batch that learning_rate=0.001 was tuned for"),
        ({"base_batch": 256}, "base_batch has no effect with lr_scaling='none': leave it out."),
        ({"final_rate": -0.1, "schedule": "cosine"}, "final_rate must lie in [0, 1]. Received: -0.1."),
        ({"final_rate": 1.1, "schedule": "cosine"}, "final_rate must lie in [0, 1]. Received: 1.1."),
        ({"final_rate": NAN, "schedule": "cosine"}, "final_rate must lie in [0, 1]. Received: nan."),
        ({"decay_power": 0.0, "schedule": "polynomial"}, "decay_power must be a positive number. Received: 0.0."),
        ({"decay_power": INF, "schedule": "polynomial"}, "decay_power must be a positive number. Received: inf."),
        ({"decay_factor": 0.0}, "decay_factor must lie in (0, 1). Received: 0.0."),
        ({"decay_factor": 1.0}, "decay_factor must lie in (0, 1). Received: 1.0."),
        (
            {"decay_at": (0.5, 0.5)},
            "decay_at must be shares of the run between 0 and 1, in rising order. Received: (0.5, 0.5).",
        ),
        ({"decay_at": (0.75, 0.5)}, "in rising order. Received: (0.75, 0.5)."),
        ({"decay_at": (0.0,)}, "decay_at must be shares of the run between 0 and 1"),
        ({"decay_at": (1.0,)}, "decay_at must be shares of the run between 0 and 1"),
        ({"decay_at": (30.0, 60.0)}, "decay_at must be shares of the run between 0 and 1"),
        ({"decay_at": (NAN,)}, "decay_at must be shares of the run between 0 and 1"),
        (
            {"schedule": "step"},
            "schedule='step' needs to know where the rate falls: add decay_at, such as 0.5.",
        ),
        (
            {"final_rate": 0.1},
            "final_rate has no effect with schedule='constant': leave it out, or use schedule='cosine' or "
            "schedule='polynomial'.",
        ),
        (
            {"final_rate": 0.1, "schedule": "step", "decay_at": (0.5,)},
            "final_rate has no effect with schedule='step'",
        ),
        (
            {"decay_power": 2.0, "schedule": "cosine"},
            "decay_power has no effect with schedule='cosine': leave it out, or use schedule='polynomial'.",
        ),
        ({"decay_at": (0.5,), "schedule": "cosine"}, "decay_at has no effect with schedule='cosine'"),
        ({"decay_factor": 0.5, "schedule": "polynomial"}, "decay_factor has no effect with schedule='polynomial'"),
        ({"weight_decay": -0.1}, "--weight-decay must be a number from 0. Received: -0.1."),
        ({"weight_decay": NAN}, "--weight-decay must be a number from 0. Received: nan."),
        ({"weight_decay": INF}, "--weight-decay must be a number from 0. Received: inf."),
        ({"ema": -0.1}, "--ema must lie in [0, 1). Received: -0.1."),
        ({"ema": 1.0}, "--ema must lie in [0, 1). Received: 1.0."),
        ({"ema": NAN}, "--ema must lie in [0, 1). Received: nan."),
        ({"clip_norm": 0.0}, "clip_norm must be a positive number. Received: 0.0."),
        ({"clip_norm": INF}, "clip_norm must be a positive number. Received: inf."),
        ({"clip_value": -1.0}, "clip_value must be a positive number. Received: -1.0."),
        ({"clip_value": NAN}, "clip_value must be a positive number. Received: nan."),
        (
            {"clip_norm": 1.0, "clip_value": 1.0},
            "Clip by norm or by value, not both: leave out clip_norm or clip_value.",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        OptimConfig(**options)


EDGES = [
    {"lr_scaling": "linear", "base_batch": 1},
    {"schedule": "cosine", "final_rate": 1.0},
    {"schedule": "polynomial", "final_rate": 0.5, "decay_power": 0.5},
    {"schedule": "step", "decay_at": (0.25, 0.5, 0.75), "decay_factor": 0.99},
    {"weight_decay": 0.0},
    {"ema": 0.999},
    {"clip_norm": 1e-9},
    {"clip_value": 5.0},
]


@pytest.mark.parametrize("options", EDGES)
def test_options_at_the_edge_are_taken_and_survive_a_file(options):
    config = Config("digits", optim=OptimConfig(**options))
    again = apply_values(Config("other"), yaml.safe_load(to_yaml(config)), "file")
    assert again == config


def test_shares_of_the_run_are_flags():
    words = ["--schedule", "step", "--decay-at", "0.5", "0.75", "--decay-factor", "0.5"]
    given = parse_options(words, "train", {"optim": OptimConfig})["optim"]
    assert (given["decay_at"], given["decay_factor"]) == ((0.5, 0.75), 0.5)
