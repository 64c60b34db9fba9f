"""One rank of the launches of test_user_script.py: a user's own script, which ends as its argument says."""

import sys
import time

import horovod.tensorflow as hvd
import tensorflow as tf

import hvdtrain


def in_an_exchange() -> None:
    """Take part in an exchange that another rank never enters."""
    hvd.allreduce(tf.constant(1.0), name="alone")


def one_exits() -> None:
    if hvdtrain.rank() == 1:
        sys.exit(3)
    in_an_exchange()


def all_exit() -> None:
    sys.exit("no data for anybody")


def well() -> None:
    """A parser's exit that was caught is no end, and `sys.exit(0)` is a good one."""
    if hvdtrain.rank() == 1:
        try:
            sys.exit(5)
        except SystemExit:
            print("went on", flush=True)
    in_an_exchange()
    hvdtrain.shutdown()
    print(f"initialized {hvdtrain.is_initialized()}", flush=True)
    sys.exit(0)


def one_leaves_unclearly() -> None:
    """Rank 1 leaves by an exit that only the interpreter sees, while rank 0 still saves."""
    if hvdtrain.rank() == 1:
        raise SystemExit
    time.sleep(3.0)
    print("saved", flush=True)


def all_leave_unclearly() -> None:
    """Both do, as scripts do that end with `raise SystemExit(main())`, and rank 0 comes late."""
    time.sleep(0.0 if hvdtrain.rank() else 3.0)
    if hvdtrain.rank() == 0:
        print("saved", flush=True)
    raise SystemExit(0)


def never_comes() -> None:
    """Rank 1 is busy elsewhere while rank 0 waits for it at a barrier."""
    if hvdtrain.rank() == 1:
        time.sleep(60.0)
    hvdtrain.barrier("data ready", timeout=2.0)


def shuts_down_first() -> None:
    """Rank 1 fails, but tears Horovod down and cleans up for long before its error comes out."""
    if hvdtrain.rank() == 1:
        try:
            raise ValueError("the cause")
        finally:
            hvd.shutdown()
            time.sleep(5.0)
    in_an_exchange()


def fails_while_saving() -> None:
    """Rank 0 has work left when the others are done, and fails in it."""
    if hvdtrain.rank() == 0:
        time.sleep(2.0)
        raise OSError("no space left on the disk")


if __name__ == "__main__":
    hvdtrain.init()
    globals()[sys.argv[1]]()
