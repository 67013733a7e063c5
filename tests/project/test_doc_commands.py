"""The commands in README, docs, example docstrings and cluster files: each is read by
the program that it is for.

Nothing is run. ``ray-adascale`` lines go through the real parser, ``ray`` lines through
Ray's own; of ``python FILE`` and ``pytest`` the files, options and test names must
exist, of ``make`` the targets.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import shlex
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.cli.main import make_parser

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "cluster.yaml", "examples/demo.sh")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "examples" / "clients").glob("*.py")),
    *sorted((ROOT / "examples" / "cluster").glob("*.yaml")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
]
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("ray-adascale", "ray", "python", "pytest", "make")
CALL = re.compile(
    rf"\s*(?:export\s|(?:\w+=\S+\s+)*(?:\S*/bin/)?(?:{'|'.join(PROGRAMS)})\s)"
)


def texts(page: Path) -> tuple[list[str], list[str]]:
    """What stands as blocks of commands, and what as code within a sentence."""
    text = page.read_text()
    if page.suffix == ".sh":
        return [text], []
    if page.suffix == ".yaml":
        return [
            "\n".join(
                line.lstrip()[1:]
                for line in text.splitlines()
                if line.lstrip().startswith("#")
            )
        ], []
    if page.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
        return re.findall(r"^    (.*)$", text, flags=re.MULTILINE), re.findall(
            r"``([^`]+)``", text
        )
    prose = FENCE.sub("", text)
    return FENCE.findall(text), re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)


def split(block: str) -> list[list[str]]:
    """The words of each command in a block, from the program's name on; lines of
    other things are left out.
    """
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        if not CALL.match(line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word[0] not in ";&>":
                words.append(word)
                continue
            while words and "=" in words[0]:  # a variable for this command
                words = words[1:]
            if words and (program := words[0].rpartition("/")[2]) in PROGRAMS:
                found.append([program, *words[1:]])
            words = []
    return found


def commands(page: Path) -> list[list[str]]:
    blocks, spans = texts(page)
    found = [words for block in blocks for words in split(block)]
    for words in (words for span in spans for words in split(span.replace("\n", " "))):
        # In a sentence the bare name of a command, such as `ray job submit`, is no
        # call.
        if words[0] not in ("ray", "ray-adascale") or not all(
            re.fullmatch("[a-z-]+", word) for word in words
        ):
            found.append(words)
    return found


def check(words: list[str]) -> None:
    program, *arguments = ["X" if word == "..." else word for word in words]
    if program == "ray-adascale":
        check_own(arguments)
    elif program == "ray":
        check_rays(arguments)
    elif program == "make":
        targets = re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
        )
        assert arguments[0] in targets, f"make {arguments[0]}"
    elif program == "pytest" or arguments[:2] == ["-m", "pytest"]:
        check_tests(arguments)
    elif arguments[0] == "-m":
        check_script([f"{arguments[1].replace('.', '/')}.py", *arguments[2:]])
    else:
        check_script(arguments)


def check_own(arguments: list[str]) -> argparse.Namespace:
    # SystemExit for what it doesn't take
    given, rest = make_parser().parse_known_args(arguments)
    assert all("=" in item and not item.startswith("-") for item in rest), rest
    assert not rest or "overrides" in given, rest
    for word in arguments:
        if match := re.fullmatch(r"(examples/\w+\.py):(\w+)", word):
            assert re.search(
                rf"^def {match[2]}\(", (ROOT / match[1]).read_text(), flags=re.MULTILINE
            ), word
    return given


def check_rays(arguments: list[str]) -> None:
    from ray.scripts.scripts import cli

    command = cli
    while hasattr(command, "commands"):
        name, *arguments = arguments
        assert name in command.commands, name
        command = command.commands[name]
    # click's UsageError for what it doesn't take
    command.make_context(command.name, list(arguments))
    if (
        "--" in arguments
        and (job := arguments[arguments.index("--") + 1 :])[0] == "ray-adascale"
    ):
        check_own(job[1:])


def check_tests(arguments: list[str]) -> None:
    given = [ROOT / word for word in arguments if word.startswith("tests/")]
    files = [
        file
        for path in given
        for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
    ]
    names = [
        name
        for file in files
        for name in re.findall(r"^def (test_\w+)", file.read_text(), flags=re.MULTILINE)
    ]
    assert names, arguments
    for option, wanted in pairwise(arguments):
        if option == "-k":
            for alternative in wanted.split(" or "):
                assert any(alternative.split(" ")[0] in name for name in names), (
                    alternative
                )


def check_script(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        ast.parse(arguments[1])
        return
    text = "\n".join(
        script.read_text() for script in with_imported(ROOT / arguments[0])
    )
    for word in arguments[1:]:
        if word.startswith("--"):
            assert f'"{word}"' in text, f"{arguments[0]} {word}"


def with_imported(script: Path) -> list[Path]:
    """The script, and the modules of its folder and of the folder above that are
    imported: they may define its options.
    """
    found, folders = [script], (script.parent, script.parent.parent)
    for path in found:  # grows meanwhile
        names = re.findall(
            r"^(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE
        )
        modules = (folder / f"{name}.py" for name in names for folder in folders)
        found += [
            module for module in modules if module.exists() and module not in found
        ]
    return found


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_commands_are_what_the_programs_take(page: Path) -> None:
    for words in commands(page):
        try:
            check(words)
        except (SystemExit, Exception) as error:
            raise AssertionError(" ".join(words)) from error


def copied(block: str) -> str:
    """What the site's copy button takes of a block, by its settings:
    sphinx_copybutton's formatCopyText.
    """
    conf = settings_of_the_site()
    lines, goes_on = [], False
    for line in block.splitlines():
        prompt = re.match(conf.copybutton_prompt_text, line)
        if prompt or goes_on:
            lines.append(line[prompt.end() :] if prompt else line)
            continuation = getattr(conf, "copybutton_line_continuation_character", "")
            goes_on = bool(continuation) and line.endswith(continuation)
    return "\n".join(lines) or block


def settings_of_the_site() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    import conf

    sys.path.pop(0)
    return conf


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name
)
def test_the_copy_button_takes_whole_commands_and_no_output(page: Path) -> None:
    for block in FENCE.findall(page.read_text()):
        if re.search(r"^\$ ", block, re.MULTILINE):
            assert split(copied(block)) == split(
                re.sub(r"^\$ ", "", block, flags=re.MULTILINE)
            )
            assert len(split(copied(block))) == len(
                re.findall(r"^\$ ", block, re.MULTILINE)
            )


def test_a_copied_command_keeps_the_options_below_its_first_line() -> None:
    (block,) = (
        b
        for b in FENCE.findall((ROOT / "docs/start/quickstart.md").read_text())
        if "ray-adascale train" in b
    )
    assert block.startswith("$ ")
    ((_, *arguments),) = split(copied(block))
    given = check_own(arguments)
    assert (given.name, given.storage_path, given.max_failures) == ("big", "runs", 1)


def test_the_commands_are_found() -> None:
    """That the check above sees what there is to see."""
    found = {
        page.relative_to(ROOT).as_posix(): [" ".join(words) for words in commands(page)]
        for page in PAGES
    }
    assert (
        "ray-adascale train examples/digits.py:workload --recipe recipe.json "
        "--num-workers 2 --per-worker-batch-size 32" in (found["examples/digits.py"])
    )
    assert any(
        line.startswith("ray job submit") and "--use-gpu" in line
        for line in found["docs/guides/cluster.md"]
    )
    assert (
        "ray exec cluster.yaml RAY_AUTH_MODE=token ray status"
        in found["docs/guides/cluster.md"]
    )
    assert "python benchmarks/memory.py" in found["benchmarks/README.md"]
    assert (
        "pytest tests/whole/test_elastic.py -k announced -s"
        in found["benchmarks/studies/pages/checkpoints.md"]
    )
    assert "make test-oldest" in found["CONTRIBUTING.md"]
    assert (
        sum(
            line.startswith("ray-adascale ")
            for lines in found.values()
            for line in lines
        )
        > 20
    )


def test_every_benchmark_has_its_entry() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text()
    texts = {path: path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")}
    for path, text in texts.items():
        if 'if __name__ == "__main__":' in text:
            assert f"| `python {path.relative_to(ROOT).as_posix()}" in table, path.name
        else:  # no benchmark, but a part of one
            imports = re.compile(rf"^(?:from|import) {path.stem}\b", re.MULTILINE)
            assert any(imports.search(other) for other in texts.values()), path.name


def test_the_page_of_commands_has_every_option_of_every_command() -> None:
    """And no other one: docs/commands.py makes it from the parsers, docs/conf.py
    appends it to the page.
    """
    sys.path.insert(0, str(ROOT / "docs"))
    import commands as page_of_commands

    sys.path.pop(0)
    from ray_adascale.cli.main import COMMANDS

    sections = re.split(
        r"^## ray-adascale (\w+)$", page_of_commands.page(), flags=re.MULTILINE
    )[1:]
    shown = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(shown) == list(COMMANDS)
    for name, text in shown.items():
        in_help = options_in_help(name)
        table = set(
            re.findall(
                r"(?<![\w-])--[a-z][\w-]*",
                "".join(re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)),
            )
        )
        assert table == in_help, name
    assert len(set(re.findall(r"--[a-z][\w-]*", shown["train"]))) > 45


def options_in_help(name: str) -> set[str]:
    """The options that the help of a command lists."""
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        make_parser().parse_args([name, "--help"])
    listed = said.getvalue().partition("options:")[2]
    lines = re.findall(r"^  (-.*?)(?:  |$)", listed, re.MULTILINE)
    return {flag for line in lines for flag in re.findall(r"--[a-z][\w-]*", line)} - {
        "--help"
    }


@pytest.mark.timeout(400)  # of a busy machine: matplotlib draws twenty pictures
@pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale")
def test_ten_commands_of_the_pages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that need no Ray, with the example of the pages in short: a recipe, and
    a run at S = 4 with a checkpoint.
    """
    pytest.importorskip("sklearn")
    from ray_adascale import AdaScaleConfig, LocalBackend, Run, record_recipe
    from ray_adascale.cli.main import main
    from ray_adascale.cli.source import resolve
    from ray_adascale.workload import build

    shutil.copy(ROOT / "examples" / "digits.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    workload = resolve("digits.py:workload")
    recipe = record_recipe(
        workload, {"lr": 0.05, "momentum": 0.9}, base_batch_size=8, total_steps=80
    )
    recipe.save("recipe.json")
    config = AdaScaleConfig(accumulation=4).with_recipe(recipe)
    built = build(workload, recipe.hyperparameters, config)
    run = Run.of(
        built, config, recipe=recipe, backend=LocalBackend("runs/big", device="cpu")
    )
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    checkpoint = next(Path("runs/big").glob("checkpoint_*"))
    for line in (
        "check digits.py:workload lr=0.05 momentum=0.9",
        "check digits.py:workload --recipe recipe.json",
        "check digits.py:workload --recipe recipe.json --storage-path runs",
        "forecast recipe.json --target-efficiency 0.6",
        "forecast recipe.json --json",
        "forecast recipe.json --workers 1,2,4,8",
        "report runs/big --recipe recipe.json --tensorboard events",
        "describe recipe.json",
        "describe runs/big",
        f"describe {checkpoint}",
    ):
        assert main(line.split()) == 0, line
        assert capsys.readouterr().out, line
    assert Path("report.html").exists()
