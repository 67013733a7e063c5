"""README.md and the pages in docs/: the Python blocks run, those of one page in one
namespace; links lead to files and headings.

Commands are tested in test_doc_commands.py. A block that must not run has a reason in a
comment on the line before it: ``<!-- not run: reason -->``. What is pasted without the
fragments runs; fragments get the names that they say they need from ``GIVEN``.
"""

from __future__ import annotations

import builtins
import dataclasses
import re
import symtable
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import ray.train
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import ray_adascale
from ray_adascale import AdaScaleConfig, read_trace

from .readme import own_loop

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
# The guide to migrating runs on two gloo workers, in test_migrating.py.
ALL_PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
)
PAGES = [page for page in ALL_PAGES if page.name != "migrating.md"]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    code: str
    reason: str | None


def blocks(text: str, page: Path) -> list[Block]:
    """The Python blocks of a page."""
    return [
        Block(page, text[: m.start("code")].count("\n"), m["code"], m["reason"])
        for m in FENCE.finditer(text)
        if m["kind"] == "python"
    ]


_FRAGMENT = re.compile(r"# In (?:your|a) program.*, with (?P<given>.*):$")
"""The first line of a block that does not run by itself, with what it needs."""


def is_fragment(block: Block) -> re.Match[str] | None:
    return _FRAGMENT.match(block.code.partition("\n")[0])


def run_page(
    found: list[Block],
    namespace: dict[str, Any],
    given: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """Paste the page's blocks one after the other into one module, fragments left out.
    A fragment runs in a copy of it, with what it needs. An error points to the page's
    own line.
    """
    of_fragments = dict(given)
    for block in found:
        if block.reason is not None:
            continue
        code = compile("\n" * block.line + block.code, str(block.page), "exec")
        if is_fragment(block):
            of_fragments = {**of_fragments, **namespace}
            exec(code, of_fragments)
        else:
            exec(code, namespace)


def built(config: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x = torch.randn(600, 16)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.get("lr", 0.1), momentum=0.9
    )
    # right for pages of any length
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.5)
    return model, optimizer, scheduler, TensorDataset(x, x[:, :4].argmax(1))


def workload(config: dict[str, Any]) -> Any:
    from ray_adascale import Workload

    model, optimizer, scheduler, dataset = built(config)
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit="step",
        train_dataset=dataset,
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


def _forecast(folder: Path) -> dict[str, Any]:
    import rich

    import ray_adascale

    recipe = ray_adascale.record_recipe(
        workload, {"lr": 0.1}, base_batch_size=8, total_steps=120
    )
    return {
        "ray_adascale": ray_adascale,
        "rich": rich,
        "recipe": recipe,
        "AdaScaleConfig": ray_adascale.AdaScaleConfig,
    }


def _checkpoints(folder: Path) -> dict[str, Any]:
    """A run whose newest checkpoint has the page's name."""
    import ray_adascale

    model, optimizer, scheduler, dataset = built({})
    config = ray_adascale.AdaScaleConfig(
        base_batch_size=8, total_steps=20, scheduler_unit="step"
    )
    run = ray_adascale.Run(
        model,
        optimizer,
        scheduler,
        dataset,
        config,
        backend=ray_adascale.LocalBackend(folder / "runs/demo"),
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
    max((folder / "runs/demo").glob("checkpoint_*/manifest.json")).parent.rename(
        folder / "runs/demo/checkpoint_..."
    )
    model, optimizer, scheduler, dataset = built({})
    return {
        "ray_adascale": ray_adascale,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "dataset": dataset,
        "config": replace(config, total_steps=40),
    }


def _report(folder: Path) -> dict[str, Any]:
    """Two runs with the page's names, and their recipe."""
    import ray_adascale

    given = _forecast(folder)
    for name, passes in (("base", 1), ("big", 8)):
        model, optimizer, scheduler, dataset = built({})
        config = ray_adascale.AdaScaleConfig(accumulation=passes)
        run = ray_adascale.Run(
            model,
            optimizer,
            scheduler,
            dataset,
            config,
            recipe=given["recipe"],
            backend=ray_adascale.LocalBackend(folder / "runs" / name),
        )
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()
    return given


def _signatures(folder: Path) -> dict[str, Any]:
    """Of a page that wants a cluster: what it calls, with the real signatures, and
    nothing behind them.
    """
    import ray.train
    from ray import tune

    import ray_adascale

    real = {
        name: getattr(ray_adascale, name)
        for name in ray_adascale.__all__
        if name != "__version__"
    }
    for name in ("AdaScaleTrainer", "Search", "tune_recipe"):
        real[name] = create_autospec(real[name])
    return {
        "ray_adascale": types.SimpleNamespace(**real),
        **real,
        "tune": tune,
        "workload": workload,
        "recipe": create_autospec(ray_adascale.Recipe, instance=True),
        "ScalingConfig": ray.train.ScalingConfig,
        "RunConfig": create_autospec(ray.train.RunConfig),
        "FailureConfig": ray.train.FailureConfig,
    }


GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "docs/guides/elastic.md": _signatures,
    "docs/guides/forecast.md": _forecast,
    "docs/guides/checkpoints.md": _checkpoints,
    "docs/guides/monitoring.md": _report,
}
assert not any(page.startswith("docs/start/") for page in GIVEN), (
    "what is pasted from a page of Start must run"
)
NEEDS_RAY = (
    "docs/start/quickstart.md",
    "docs/start/workloads.md",
    "docs/guides/data.md",
)
NEEDS_GROUP = ("docs/guides/sharding.md",)  # a process group, of one worker


def _pages() -> list[Any]:
    pages = []
    for page in PAGES:
        found = blocks(page.read_text(), page)
        if any(block.reason is None for block in found):
            marks = [pytest.mark.ray] if _name(page) in NEEDS_RAY else []
            pages.append(pytest.param(page, id=_name(page), marks=marks))
    return pages


# advice, on toy problems
@pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale")
@pytest.mark.parametrize("page", _pages())
def test_the_python_blocks_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if _name(page) in NEEDS_GROUP:
        request.getfixturevalue("pool")(1).run(
            run_page, blocks(page.read_text(), page), {"__name__": "__main__"}
        )
        return
    monkeypatch.chdir(tmp_path)
    if _name(page) in NEEDS_RAY:
        request.getfixturevalue("ray_session")
    # Functions that go to Ray's workers must not belong to a module that these would
    # import.
    given = GIVEN[_name(page)](tmp_path) if _name(page) in GIVEN else {}
    run_page(blocks(page.read_text(), page), {"__name__": "__main__"}, given)


def names_of(code: str) -> tuple[set[str], set[str]]:
    """The names that a block uses as globals, and those that it makes."""
    used, made = set[str](), set[str]()

    def walk(table: symtable.SymbolTable) -> None:
        inside = table.get_type() != "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or not inside):
                used.add(symbol.get_name())
            if not inside and (symbol.is_assigned() or symbol.is_imported()):
                made.add(symbol.get_name())
        for child in table.get_children():
            walk(child)

    walk(symtable.symtable(code, "block", "exec"))
    return used, made


@pytest.mark.parametrize("page", ALL_PAGES, ids=_name)
def test_a_block_that_needs_more_than_its_page_has_says_so(page: Path) -> None:
    """What is pasted in the order of the page runs (test_the_python_blocks_run), or
    its first line says what it needs: each name that is not made on the page.
    """
    known = set(dir(builtins)) | {"__name__"}
    for block in blocks(page.read_text(), page):
        used, made = names_of(block.code)
        missing = used - made - known
        fragment = is_fragment(block)
        if fragment is None:
            known |= made
        where = f"{_name(page)}:{block.line + 1}"
        if missing or block.reason is not None:
            assert fragment is not None, f"{where} lacks {sorted(missing)}"
            told = set(re.findall(r"\w+", fragment["given"]))
            imports = {*ray_adascale.__all__, *dir(ray.train), "ray_adascale", "rich"}
            if "imports" in told:
                missing -= imports
            assert missing <= told, where
    if page.name == "migrating.md" or _name(page) in NEEDS_GROUP:
        for block in blocks(page.read_text(), page):
            assert "init_process_group" in block.code or is_fragment(block)


@pytest.mark.parametrize("page", ALL_PAGES, ids=_name)
def test_no_block_is_passed_over(page: Path) -> None:
    """Each fence is one that FENCE sees, and of a kind for which there is a test or
    that holds no code.
    """
    text = page.read_text()
    found = list(FENCE.finditer(text))
    assert len(re.findall(r"^\s*(?:```|~~~)", text, flags=re.MULTILINE)) == 2 * len(
        found
    )
    assert {block["kind"] for block in found} <= {"python", "text", "diff", ""}


@pytest.mark.parametrize(
    "page",
    [
        path
        for path in ALL_PAGES
        if path.parent.name in ("start", "guides", "reference")
    ],
    ids=_name,
)
def test_code_fits_the_width_of_the_site(page: Path) -> None:
    """102 characters (docs/static/site.css); blocks of kind "text" wrap."""
    found = [
        block for block in FENCE.finditer(page.read_text()) if block["kind"] != "text"
    ]
    assert not [
        line
        for block in found
        for line in block["code"].splitlines()
        if len(line) > 102
    ]


@pytest.mark.ray
def test_the_readmes_own_loop_runs(ray_session: Path) -> None:
    """What README's first diff makes of a loop, on one worker without a GPU, two
    epochs.
    """
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    import ray_adascale

    code = own_loop()
    for said, small in (
        (
            "num_workers=8, use_gpu=True)",
            "num_workers=1), run_config=RunConfig(name='readme', "
            f"storage_path={str(ray_session)!r})",
        ),
        ("total_epochs=100", "total_epochs=2"),
        ("TorchTrainer(", "result = TorchTrainer("),
    ):
        assert said in code
        code = code.replace(said, small)
    namespace: dict[str, Any] = {
        "__name__": "__main__",
        "build": built,
        "F": F,
        "ray_adascale": ray_adascale,
        "AdaScaleConfig": ray_adascale.AdaScaleConfig,
        "RunConfig": RunConfig,
        "ScalingConfig": ScalingConfig,
        "TorchTrainer": TorchTrainer,
    }
    exec(code, namespace)
    # 600 examples in base batches of 128, for two epochs; the last step may go over.
    assert (
        2 * 600 // 128
        <= namespace["result"].metrics["effective_steps"]
        < 2 * 600 // 128 + 2
    )
    assert read_trace(ray_session / "readme")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them: small letters, no punctuation,
    hyphens for spaces.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(
            name
            if name not in found
            else f"{name}-{sum(other.startswith(name) for other in found)}"
        )
    return found


@pytest.mark.parametrize("page", ALL_PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(
        r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()
    ):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=_name)
def test_fields_that_are_named_exist(page: Path) -> None:
    """`AdaScaleConfig(...)` with a keyword that it doesn't have."""
    fields = {field.name for field in dataclasses.fields(AdaScaleConfig)}
    for call in re.findall(r"`AdaScaleConfig\(([^()`]*)\)", page.read_text()):
        for name in re.findall(r"(\w+)=", call):
            assert name in fields, name


OTHERS_OWN = (
    "No available agent to submit job",
    "Requesting resources",
    "No such file or directory",
    "401",
    "Gloo connectFullMesh failed ... remote=[127.0.1.1]",
    "Duplicate GPU detected",
)


def test_symptoms_are_what_the_package_says() -> None:
    """What troubleshooting.md quotes in its first column stands in the source; `...`
    for what differs.
    """
    source = "".join(
        path.read_text() for path in sorted((ROOT / "ray_adascale").rglob("*.py"))
    )
    said = re.sub(r"\"\s*\n\s*f?\"", "", source)  # a message over several lines
    quotes = re.findall(
        r"^\| `([^`]+)` \|",
        (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(),
        flags=re.MULTILINE,
    )
    assert len(quotes) > 10
    for quote in quotes:
        if quote in OTHERS_OWN:
            continue
        for piece in re.split(r"\.\.\.|50", quote):
            assert piece.strip().removeprefix("CheckpointError: ") in said, quote


def test_the_page_of_monitoring_has_every_metric_and_every_column() -> None:
    from ray_adascale.run.observe.metrics import COUNTERS, METRICS, OWN_KEYS
    from ray_adascale.run.observe.trace import COLUMNS

    sys.path.insert(0, str(ROOT / "docs"))
    import columns

    sys.path.pop(0)
    page = (ROOT / "docs/guides/monitoring.md").read_text()
    assert columns.page() == page, "make docs"
    assert (
        {*METRICS, *COUNTERS} - {"total_steps"} <= set(COLUMNS) <= OWN_KEYS | {"loss"}
    )
    assert re.findall(r"^\| `(\w+)` \* \|", page, flags=re.MULTILINE) == [
        key for key in COLUMNS if key in METRICS
    ]


def test_the_table_of_gains_is_computed() -> None:
    """docs/guides/choosing.md shows the numbers that its own block computes."""
    page = ROOT / "docs" / "guides" / "choosing.md"
    namespace: dict[str, Any] = {}
    run_page(blocks(page.read_text(), page), namespace)
    for scale, batch, r, share, steps, examples in namespace["rows"]:
        row = (
            f"| {scale} | {batch} | {r} | {share.replace('%', ' %')} | {steps} | "
            f"{examples} |"
        )
        assert row in page.read_text(), row


def test_pages_that_sources_name_exist() -> None:
    """Docstrings, messages, comments and the changelog name pages by their path from
    the repository.
    """
    named = 0
    for page in [
        *(
            path
            for folder in ("ray_adascale", "examples", "benchmarks", "tests", "docs")
            for path in ROOT.glob(f"{folder}/**/*.py")
        ),
        *ROOT.glob("examples/**/*.yaml"),
        ROOT / "cluster.yaml",
        ROOT / "CHANGELOG.md",
    ]:
        for name in re.findall(
            r"\b(?:docs|benchmarks)/[\w./-]+\.(?:md|py)\b", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{_name(page)}: {name}"
            named += 1
    assert named > 20


LISTED = re.compile(r"^- \[(.+)\]\((.+\.(?:md|ipynb))\)$", re.MULTILINE)


def listed() -> list[tuple[str, Path]]:
    """The pages in docs/contents.md with their titles there. The site's navigation
    is made of this list (docs/conf.py).
    """
    contents = ROOT / "docs" / "contents.md"
    return [
        (title, (contents.parent / name).resolve())
        for title, name in LISTED.findall(contents.read_text())
    ]


def test_every_page_is_in_the_contents() -> None:
    """But those of studies and of the API, and those that stand outside the
    navigation, which must be linked.
    """
    sys.path.insert(0, str(ROOT / "docs"))
    import conf

    sys.path.pop(0)
    others = (
        "README.md",
        "docs/reference/api/",
        "benchmarks/studies/",
        *(f"{name}.md" for name in conf.OUTSIDE),
    )
    pages = [page for page in ALL_PAGES if not _name(page).startswith(others)]
    tutorial, index = (
        ROOT / "examples/tutorial.ipynb",
        ROOT / "docs/reference/api/index.md",
    )
    assert sorted(page for _, page in listed()) == sorted([*pages, tutorial, index])
    for name in conf.OUTSIDE:
        links = [
            page
            for page in ALL_PAGES
            if f"{name.rpartition('/')[2]}.md" in page.read_text()
        ]
        assert links, name


def test_a_page_has_one_title_in_the_navigation_and_at_its_top() -> None:
    for title, page in listed():
        first = re.findall(
            r"# (.+?)(?:\\n\",)?$", page.read_text(), flags=re.MULTILINE
        )[0]
        assert title == first, page
    in_readme = {
        name: title
        for title, name in re.findall(
            r"\[([^\]]+)\]\((docs/[^)#]+\.md)\)", documentation()
        )
    }
    titles = {_name(page): title for title, page in listed()}
    assert {name: titles.get(name, "all pages") for name in in_readme} == in_readme


def documentation() -> str:
    return (ROOT / "README.md").read_text().partition("\n## Documentation\n")[2]
