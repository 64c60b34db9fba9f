import pytest
import yaml

from hvdtrain.cli.parser import parse_options
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import apply_values, to_yaml
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.run import Config


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.75, 0.5), (0.0,), (1.0,), (30.0, 60.0), (float("nan"),)])
def test_the_rate_falls_within_the_run(shares):
    with pytest.raises(ConfigError, match="decay_at must be shares of the run between 0 and 1, in rising order"):
        OptimConfig(schedule="step", decay_at=shares)


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
