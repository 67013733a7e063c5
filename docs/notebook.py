"""The tutorial, examples/tutorial.ipynb: run it from top to bottom with its outputs
stored, and turn it into a page of the site.

    python docs/notebook.py        # run it anew, in the environment of this Python (nbclient, ipykernel)

``docs/conf.py`` reads the stored notebook as Markdown, so building the site runs
nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tutorial.ipynb"


def markdown(notebook: str) -> str:
    """Return a notebook, in JSON, as Markdown: text, code, and outputs as text or
    pictures.
    """
    return "\n\n".join(
        part for cell in json.loads(notebook)["cells"] for part in parts(cell)
    )


def parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield (
                "![output of the "
                f"cell](data:image/png;base64,{''.join(data['image/png']).strip()})"
            )
        elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            yield f"```text\n{text}\n```"


def executed(folder: Path, timeout: int = 600) -> Any:
    """Run the notebook in a folder, and return it with the new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised an exception.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # times of this run
        for output in cell.get("outputs", ()):
            if "text" in output:  # a warning names a temporary file for the cell
                output.text = re.sub(
                    r"\S*ipykernel_\d+\S*?(:\d+:)", r"cell\1", output.text
                )
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        }
    }
    return notebook


def main() -> int:
    import tempfile

    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(Path(folder)), NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
