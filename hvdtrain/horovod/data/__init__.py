"""tf.data service beside a Horovod job, as `horovod.tensorflow.data`."""
