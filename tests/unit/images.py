"""Small class folders of real JPEG and PNG files."""

import io
import tarfile

import numpy as np
from PIL import Image


def encoded(pixels, kind="png"):
    """Return `pixels` [height, width, 3] as a file's bytes."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def picture(number, size=8):
    """Return the pixels of image `number`: noise that is its own."""
    return np.random.default_rng(number).integers(0, 256, (size, size, 3)).astype(np.uint8)


def write_folders(root, *, classes=("ant", "bee"), each=5, prefix="", kind="png", size=8):
    """Write `each` images of every class, and return their names in the order of a scan."""
    names = []
    for number, name in enumerate(classes):
        folder = root / prefix / name
        folder.mkdir(parents=True)
        for place in range(each):
            file = folder / f"{place:03}.{kind}"
            file.write_bytes(encoded(picture(number * each + place, size), kind))
            names.append(file)
    return names


def tar_of(folder, target, mode="w:gz"):
    with tarfile.open(target, mode) as archive:
        archive.add(folder, folder.name)
    return target
