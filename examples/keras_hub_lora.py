"""Fine-tuning a model of KerasHub by LoRA: two small matrices beside each projection are trained, all else is frozen.

    pip install keras-hub
    horovodrun -np 2 python examples/keras_hub_lora.py --preset gemma3_1b

Shows the loss and how few of the parameters are trained; only their gradients travel. Without `--preset`, a tiny
decoder with random weights shows that all of it works.
"""

import argparse

import hvdtrain

hvdtrain.init()

import keras
import keras_hub
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--preset", help="what KerasHub downloads, such as gemma3_1b")
parser.add_argument("--rank", type=int, default=4, help="of the small matrices")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

TEXTS = ["Horovod is a Russian folk dance.", "Dancers join hands in a circle.", "It turns to the sound of a song."] * 8
if args.preset:
    if hvdtrain.local_rank() == 0:
        keras_hub.models.CausalLM.from_preset(args.preset)  # one rank of each host downloads it
    hvdtrain.barrier()
    model = keras_hub.models.CausalLM.from_preset(args.preset)
    data = TEXTS  # the model's preprocessor makes tokens of them
else:
    sizes = {"vocabulary_size": 128, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
    backbone = keras_hub.models.LlamaBackbone(num_query_heads=4, num_key_value_heads=2, **sizes)
    model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    letters = np.array([[ord(letter) for letter in text.ljust(33)] for text in TEXTS])
    data = ({"token_ids": letters[:, :-1], "padding_mask": np.ones((len(TEXTS), 32))}, letters[:, 1:])

model.backbone.enable_lora(args.rank)
model.compile(
    keras.optimizers.AdamW(1e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
)
trained, all_of_them = (sum(int(np.prod(w.shape)) for w in ws) for ws in (model.trainable_weights, model.weights))
if hvdtrain.rank() == 0:
    print(f"trains {trained:,} of {all_of_them:,} parameters")
trainer = hvdtrain.Trainer(model)
if args.preset:
    trainer.fit(data, batch=8, epochs=args.epochs)
else:
    trainer.fit(*data, batch=8, epochs=args.epochs)
