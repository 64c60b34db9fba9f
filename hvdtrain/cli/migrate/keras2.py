"""Replacements for parts of Keras 2 and TensorFlow 1 that Keras 3 and TensorFlow 2 lack.

Whether a module has a name, and a function an argument, is read from the installed packages (`packages.py`). Here is
what cannot be seen there: members of objects, arguments behind `**kwargs`, file endings, and advice.
"""

METHODS = {
    "fit_generator": "Keras 3 has model.fit only: fit(generator, steps_per_epoch=...), without workers etc.",
    "evaluate_generator": "Keras 3 has model.evaluate only: evaluate(generator, steps=...), without workers etc.",
    "predict_generator": "Keras 3 has model.predict only: predict(generator, steps=...), without workers etc.",
    "add_metric": "Keras 3 has no add_metric: pass metrics to model.compile, or update one in call.",
    "reset_states": "Keras 3 calls it reset_state, of metrics and of each stateful layer.",
}
"""Methods that Keras 3 lacks and that only Keras has, so that the object's type does not matter."""
FILES = {
    "save": (
        (".keras", ".h5", ".hdf5"),
        "Keras 3 needs a file name that ends in .keras; model.export writes a SavedModel.",
    ),
    "save_weights": ((".weights.h5",), "Keras 3 needs a file name that ends in .weights.h5."),
    "load_weights": (
        (".h5", ".hdf5", ".keras"),
        "Keras 3 reads weights from files that end in .weights.h5 (or .h5 of Keras 2).",
    ),
}
"""Endings of file names that methods take, and advice on others."""
LOAD_H5 = "Keras 3 does not read every .h5 file of Keras 2 (losses by name, Lambda layers): save and load .keras."
FLOWS = ("flow", "flow_from_directory", "flow_from_dataframe")
"""Methods of `ImageDataGenerator`, which give a Keras 2 script batches without end."""
GONE_METHODS = {
    "predict_classes": "Keras has it no more: model.predict(x).argmax(-1), or (model.predict(x) > 0.5).",
    "to_yaml": "Keras has it no more: model.to_json.",
}
"""Methods that tf_keras lacks, too."""
OPTIMIZER_MEMBERS = {
    "lr": "optimizers of Keras 3 have learning_rate; assigning lr changes nothing.",
    "weights": "optimizers of Keras 3 have variables, a list.",
    "get_weights": "optimizers of Keras 3 have variables: [v.numpy() for v in optimizer.variables].",
    "minimize": "Keras 3 has no minimize: compute gradients with a tape, and optimizer.apply_gradients.",
    "get_gradients": "Keras 3 has no get_gradients: use a tape.",
    "get_updates": "Keras 3 has no get_updates: use a tape, and optimizer.apply_gradients.",
    "get_slot": "Keras 3 has no get_slot: the slots are in optimizer.variables.",
    "get_slot_names": "Keras 3 has no get_slot_names: the slots are in optimizer.variables.",
    "decay": "Keras 3 has no decay: pass a schedule of keras.optimizers.schedules as learning_rate.",
    "loss_scale": "a LossScaleOptimizer of Keras 3 has its scale in dynamic_scale.",
    "_decayed_lr": "Keras 3 has learning_rate, also with a schedule.",
    "_get_hyper": "Keras 3 has attributes: optimizer.learning_rate.",
    "_set_hyper": "Keras 3 has attributes: optimizer.learning_rate = ...",
    "_compute_gradients": "Keras 3 has no _compute_gradients: use a tape.",
    "_create_all_weights": "Keras 3 calls it build.",
    "get_scaled_loss": "Keras 3 calls it scale_loss.",
    "get_unscaled_gradients": "leave it out: LossScaleOptimizer of Keras 3 unscales in apply_gradients.",
}
"""Members of Keras 2's optimizers that Keras 3's lack."""
REFUSED_BY_WRAPPED = {
    *("get_gradients", "get_updates", "get_slot", "get_slot_names", "decay", "loss_scale", "get_unscaled_gradients")
}
"""Members that optimizers from `hvd.DistributedOptimizer` lack, too."""

_OF_READING = {
    name: f"leave {name} out: Keras 3 has it in keras.utils.PyDataset."
    for name in ("workers", "use_multiprocessing", "max_queue_size")
}
KEYWORDS = {
    "compile": {
        "experimental_run_tf_function": "leave experimental_run_tf_function out: Keras 3 does not know it.",
        "experimental_steps_per_execution": "the argument is called steps_per_execution.",
        "sample_weight_mode": "leave sample_weight_mode out: Keras 3 does not know it.",
        "target_tensors": "leave target_tensors out: Keras 3 does not know it.",
    },
    "fit": {**_OF_READING, "nb_epoch": "the argument is called epochs."},
    "evaluate": _OF_READING,
    "predict": _OF_READING,
    "train_on_batch": {"reset_metrics": "leave reset_metrics out: call model.reset_metrics()."},
}
"""Keyword arguments of methods that Keras 3 lacks."""
APPLY_GRADIENTS = ("name", "experimental_aggregate_gradients", "skip_gradients_aggregation")

OPTIMIZER_KEYWORDS = {
    "lr": "the argument is called learning_rate.",
    "decay": "Keras 3 ignores decay: pass a schedule of keras.optimizers.schedules as learning_rate.",
}
TF_KERAS_OPTIMIZER_KEYWORDS = {
    "lr": "the argument is called learning_rate; lr is passed over.",
    "decay": "decay is for the optimizers of optimizers.legacy: use one, or pass a schedule as learning_rate.",
}
LAYER_KEYWORDS = {
    "weights": "Keras 3's layers take no weights: call layer.set_weights, or pass an initializer.",
    "batch_input_shape": "the argument is called batch_shape, of keras.Input.",
    "fused": "leave fused out: Keras 3 does not know it.",
    "time_major": "Keras 3 has no time_major: transpose the inputs.",
}
"""Arguments of layers that Keras 3 refuses although the layers take `**kwargs`."""
MODEL_KEYWORDS = {"input": "the argument is called inputs.", "output": "the argument is called outputs."}
HINTS = {
    "period": "save_freq='epoch' saves after each; Keras 3 counts an integer in batches.",
    "write_grads": "leave it out.",
    "batch_size": "leave it out.",
    "l": "l1 and l2 are called so.",
    "epsilon": "the argument is called min_delta.",
}
"""Advice on arguments that a callback or function of Keras lacks."""

_GPUS = "to choose a GPU: tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')."
NAME_HINTS = {
    "ConfigProto": _GPUS,
    "Session": _GPUS,
    "set_session": f"Keras has no sessions; {_GPUS}",
    "get_session": "Keras has no sessions: read a variable with .numpy().",
    "set_learning_phase": "pass training=True or False to the model.",
    "learning_phase": "pass training=True or False to the model.",
    "set_value": "variable.assign(value); a learning rate: optimizer.learning_rate = value.",
    "get_value": "variable.numpy().",
    "multi_gpu_model": "Horovod runs one process for each GPU: leave it out.",
    "np_utils": "keras.utils.to_categorical and the others are in keras.utils.",
    "mean_squared_error": "pass the name 'mean_squared_error', or keras.losses.MeanSquaredError().",
    "categorical_crossentropy": "pass its name, or keras.losses.CategoricalCrossentropy().",
    "sparse_categorical_crossentropy": "pass its name, or keras.losses.SparseCategoricalCrossentropy().",
    "binary_crossentropy": "pass its name, or keras.losses.BinaryCrossentropy().",
    "CosineDecay": "keras.optimizers.schedules.CosineDecay.",
    "LearningRateSchedule": "keras.optimizers.schedules.LearningRateSchedule.",
    "normal": "keras.initializers.RandomNormal.",
    "SyncBatchNormalization": "use hvd.SyncBatchNormalization, which averages over the ranks.",
    "enable_mixed_precision_graph_rewrite": "keras.mixed_precision.set_global_policy('mixed_float16').",
    "enable_eager_execution": "leave it out: TensorFlow 2 is eager.",
    "set_policy": "keras.mixed_precision.set_global_policy.",
    "ImageDataGenerator": "keras.utils.image_dataset_from_directory, and layers such as keras.layers.RandomFlip.",
    "KerasClassifier": "keras.wrappers.SKLearnClassifier.",
    "CuDNNLSTM": "keras.layers.LSTM.",
    "CuDNNGRU": "keras.layers.GRU.",
    "contrib": "TensorFlow 2 has no contrib.",
    "estimator": "TensorFlow 2.16 and later have no Estimators: use model.fit.",
}
"""Advice on names that a module lacks, by any part of the dotted name."""
