"""Where values lie in the whole, of variables that have none yet."""

import keras

from hvdtrain.runtime.placement import Placement, place, placement_of


class Inner(keras.layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(2, 3))
        place(self.table, PLACE)

    def call(self, inputs):
        return inputs @ self.table


class Outer(keras.layers.Layer):
    """Without `build`: Keras calls it for its shapes alone, and gives values to what is inside afterwards."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def call(self, inputs):
        return self.inner(inputs)


PLACE = Placement((4, 3), (slice(0, 2), slice(0, 3)), ("ep",), held_by=("ep",))


def test_a_variable_that_gets_its_values_later_keeps_its_place():
    model = keras.Sequential([Outer()])
    model(keras.ops.ones((1, 2)))
    (table,) = model.variables
    assert placement_of(table) == PLACE
    assert placement_of(table.value) == PLACE
