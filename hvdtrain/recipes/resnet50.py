"""ResNet-50, the usual yardstick of data-parallel training."""

from hvdtrain.config.data import DataConfig
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig


def resnet50() -> Config:
    """ResNet-50 on random 224 x 224 images, to measure it; on real ones by --data tfrecord --data-args path FOLDER.

    The learning rate is that of He et al. (2015) for 256 images a step and follows the batch. The decay of 1e-3 acts
    on the weights themselves: with a momentum of 0.9 it is their 1e-4 within the loss. For batches in the thousands add
    --warmup-steps, about five epochs (Goyal et al. 2017, arXiv:1706.02677).
    """
    return Config(
        recipe="resnet50",
        model=ModelConfig("resnet_imagenet"),
        data=DataConfig("synthetic_images", {"size": 224, "classes": 1000, "samples": 256}, batch=32, eval_batch=32),
        optim=OptimConfig(
            "sgd",
            {"momentum": 0.9, "nesterov": True},
            learning_rate=0.1,
            lr_scaling="linear",
            base_batch=256,
            schedule="cosine",
            weight_decay=1e-3,
        ),
        training=TrainingConfig(epochs=90),
    )
