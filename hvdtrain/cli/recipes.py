"""`recipes`: list the recipes, one line each."""

import argparse

from hvdtrain.recipes.registry import RECIPES, describe


def main(argv: list[str]) -> int:
    """Print every recipe with its description."""
    argparse.ArgumentParser("python -m hvdtrain recipes", description="List the recipes.").parse_args(argv)
    width = max(map(len, RECIPES))
    for name in RECIPES:
        print(f"{name:<{width}}  {describe(name)}")
    return 0
