"""`completion`: print a script that completes `hvdtrain` in a shell."""

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Mapping

from hvdtrain.cli.options import Option
from hvdtrain.cli.train import known_options
from hvdtrain.config.registry import resolve
from hvdtrain.recipes.registry import RECIPES
from hvdtrain.runtime.launchers import detect_environment

_DESCRIPTION = """\
Print a script that completes hvdtrain. It is read by a new shell from where it is kept:

  hvdtrain completion bash > ~/.local/share/bash-completion/completions/hvdtrain
  hvdtrain completion fish > ~/.config/fish/completions/hvdtrain.fish
  hvdtrain completion zsh  > ~/.hvdtrain-completion.zsh     and source that in ~/.zshrc
"""
SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def main(argv: list[str]) -> int:
    """Print the script for a shell."""
    from hvdtrain.cli.main import VERBS

    parser = argparse.ArgumentParser(
        "python -m hvdtrain completion",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(argv).shell
    if detect_environment().rank == 0:
        options, verbs = known_options(), verb_words(VERBS)
        print(fish_script(options, verbs) if shell == "fish" else bash_script(options, verbs, zsh=shell == "zsh"))
    return 0


def verb_words(verbs: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what may follow each verb but `train`: its commands, and the flags that its help names."""
    words = {}
    for verb, target in verbs.items():
        if verb not in ("train", "completion"):
            commands = getattr(importlib.import_module(target.partition(":")[0]), "COMMANDS", {})
            helps = [
                _help_of(verb, target, ["--help"]),
                *(_help_of(verb, target, [each, "--help"]) for each in commands),
            ]
            words[verb] = [*commands, *sorted({flag for text in helps for flag in _FLAG.findall(text)} | {"--help"})]
    return words


def bash_script(options: Mapping[str, Option], verbs: Mapping[str, list[str]], *, zsh: bool = False) -> str:
    """Return a completion script for bash, or for zsh by way of its bashcompinit."""
    cases = [
        f"        {flag}) words={_quoted(option.choices)} ;;" for flag, option in options.items() if option.choices
    ]
    cases += [f"        {flag}) files=1 ;;" for flag, option in options.items() if option.is_path]
    after = [f"        {verb}) words={_quoted(words)} ;;" for verb, words in verbs.items()]
    lines = [
        *(["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"] if zsh else []),
        "_hvdtrain() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words="" files=""',
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f"        words={_quoted([*verbs, 'train', 'completion', *RECIPES, '--help', '--version', *options])}",
        "    else",
        '        case "${COMP_WORDS[1]}" in',
        *(f"    {line}" for line in after),
        f"            completion) words={_quoted(SHELLS)} ;;",
        f"            train) words={_quoted([*RECIPES, *options, '--help'])} ;;",
        f"            *) words={_quoted([*options, '--help'])} ;;",
        "        esac",
        "    fi",
        '    case "$previous" in',
        *cases,
        "    esac",
        '    [ -n "$files" ] || COMPREPLY=($(compgen -W "$words" -- "$current"))',
        '    [ -n "${COMPREPLY[*]}" ] || COMPREPLY=($(compgen -f -- "$current"))',
        "}",
        "complete -o filenames -F _hvdtrain hvdtrain",
    ]
    return "\n".join(lines)


def fish_script(options: Mapping[str, Option], verbs: Mapping[str, list[str]]) -> str:
    """Return a completion script for fish."""
    first = " ".join([*verbs, "train", "completion", *RECIPES])
    other = " ".join([*verbs, "completion"])
    lines = [f"complete -c hvdtrain -n __fish_use_subcommand -a {_quoted([first])}"]
    for option in options.values():
        values = f" -a {_quoted(option.choices)} -x" if option.choices else " -r"
        lines.append(
            f"complete -c hvdtrain -n 'not __fish_seen_subcommand_from {other}' -l {option.flag[2:]}{values} "
            f"-d {_quoted([option.help.partition('. ')[0]])}"
        )
    lines += [
        f"complete -c hvdtrain -n '__fish_seen_subcommand_from {verb}' -a {_quoted(words)}"
        for verb, words in {**verbs, "completion": [*SHELLS]}.items()
    ]
    return "\n".join(lines)


def _help_of(verb: str, target: str, argv: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        resolve("verb", verb, {verb: target})(argv)
    return text.getvalue()


def _quoted(words: tuple[str, ...] | list[str]) -> str:
    return "'" + " ".join(words).replace("'", "'\\''") + "'"
