"""README.md and docs/ are complete, and what they name exists."""

import ast
import contextlib
import importlib.util
import re
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.cli.main import VERBS, main
from hvdtrain.runtime.horovod_patches import series
from tests.entry.docs.pages import PAGES, ROOT, blocks_of, text_of

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LINKED_FROM = [*PAGES, "CONTRIBUTING.md"]


def prose_of(page):
    """A page without its fenced blocks, in which brackets are no links and # begins no heading."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED_FROM)
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose_of(page)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert goal.exists(), target
        if anchor:
            assert anchor in anchors_of(str(goal.relative_to(ROOT))), target


def test_the_description_has_no_link_that_a_package_index_would_break():
    text = text_of("DESCRIPTION.md")
    assert [target for target in LINK.findall(text) if not target.startswith("https:")] == []
    assert all(
        each in text_of("README.md")
        for block in re.findall(r"```diff\n(.*?)```", text, re.S)
        for each in block.splitlines()
    )


def test_every_page_is_linked_from_the_readme():
    linked = {target.partition("#")[0] for target in LINK.findall(prose_of("README.md"))}
    assert [page for page in PAGES if page != "README.md" and page not in linked] == []


def test_every_verb_is_documented():
    text = text_of("docs/options.md")
    assert [verb for verb in VERBS if not re.search(rf"^\| `{verb}\b", text, re.MULTILINE)] == []


def test_every_public_name_is_documented():
    text = "".join(map(text_of, PAGES))
    assert [name for name in hvdtrain.__all__ if not re.search(rf"hvdtrain\.{name}\b", text)] == []


def words_of(command):
    """The words after `python -m hvdtrain` of a command; none if it is another program's."""
    found = re.search(r"(?:python -m )?\bhvdtrain (?!\|)(.*)", command)
    return re.split(r" [|>] ", found[1])[0].split() if found and "pip install" not in command else []


def verb_of(words):
    """The verb, and the second word of verbs that have several parts."""
    if words[0] not in VERBS:
        return ["train"]
    parts = {
        "checkpoint": ("list", "verify", "export"),
        "data": ("pack",),
        "bench": ("collectives", "compare", "report"),
    }
    return words[: 2 if words[1:2] and words[1] in parts.get(words[0], ()) else 1]


SHELL_BLOCKS = [block for page in PAGES for block in blocks_of(page, "bash", "sh")]
PRINTED = sorted({text for block in SHELL_BLOCKS for text in block.commands if "--" in " ".join(words_of(text))})


@pytest.mark.parametrize("command", PRINTED)
def test_the_options_of_printed_commands_exist(command, capsys):
    words = words_of(command)
    verb = verb_of(words)
    with contextlib.suppress(SystemExit):  # argparse leaves so
        main([*verb, "--help", *(["all"] if verb == ["train"] else [])])
    text = capsys.readouterr().out + "--config --run-dir --resume --dry-run --version --help"
    assert [word for word in words if word.startswith("--") and word not in text] == []


def test_blocks_that_are_not_run_are_few_and_say_why():
    """A new one belongs here: everybody sees what a reader cannot rely on."""
    skipped = [(page, block.not_run) for page in PAGES for block in blocks_of(page) if block.not_run]
    why = "since a job has one layout"
    assert skipped == [
        ("README.md", "tests/entry/docs/test_commands.py runs it with each of two packages as hvd"),
        ("docs/context_parallel.md", f"tests/entry/test_context_parallel.py runs it, {why}"),
        ("docs/context_parallel.md", f"tests/unit/parallel/context trains such a layer, {why}"),
        ("docs/own_loops.md", "it starts a job of its own; tests/entry/test_run_function.py"),
        ("docs/pipeline_parallel.md", f"tests/entry/test_pipeline.py runs it, {why}"),
        ("docs/tensor_parallel.md", f"tests/entry/test_tensor_parallel.py runs it, {why}"),
        ("docs/tensor_parallel.md", f"tests/distributed/checks/fused_heads.py trains such a model, {why}"),
        ("docs/trackers.md", "tests/trackers runs such a script, with both packages"),
        ("docs/trackers.md", "tests/trackers does what this section says"),
    ]


# --- messages -----------------------------------------------------------------------------------------------

OF_OTHERS = (
    "horovodrun: command",
    "mpirun has",
    "There are not enough",
    "ModuleNotFoundError",
    "libmpi",
    "One or more",
)
OF_OTHERS += ("A system-required", "Requested to", "exited on signal", "Exit code", "ResourceExhausted")
"""How messages of other programs begin."""


def listed_messages():
    items = re.findall(r"^- ((?:`[^`]+`(?: \(137\))?,?\s*)+):", text_of("docs/troubleshooting.md"), re.MULTILINE)
    return [" ".join(message.split()) for item in items for message in re.findall(r"`([^`]+)`", item)]


def messages_in_the_code():
    """All texts in the sources and in the patches of Horovod; a placeholder of the sources is a NUL character."""
    for path in Path(hvdtrain.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    yield from (path.read_text() for path in series())


def test_our_listed_messages_exist():
    code = "\n".join(messages_in_the_code())
    ours = [message for message in listed_messages() if not message.startswith(OF_OTHERS)]
    assert len(ours) >= 12
    for message in ours:
        parts = [part.strip(" .") for part in message.split("…")]
        missing = [part for part in parts if part and part not in code]
        assert missing == [], message


def test_horovods_listed_messages_exist():
    found = importlib.util.find_spec("horovod")
    if found is None or not found.submodule_search_locations:
        pytest.skip("Horovod is not installed")
    library = b"".join(path.read_bytes() for path in Path(found.submodule_search_locations[0]).rglob("mpi_lib*.so"))
    listed = [message for message in listed_messages() if message.startswith(("One or more", "Requested to"))]
    assert len(listed) == 2
    assert all(message.encode() in library for message in listed)
