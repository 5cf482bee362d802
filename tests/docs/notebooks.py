"""Execute a notebook in a real kernel.

`python -m tests.docs.notebooks NOTEBOOK FOLDER` prints, as a JSON list, what each code cell printed.
"""

import json
import sys

import nbformat
from nbclient import NotebookClient


def main(notebook: str, folder: str) -> None:
    """The kernel works in `folder`; an error in a cell ends it all with its traceback."""
    nb = nbformat.read(notebook, nbformat.NO_CONVERT)
    NotebookClient(nb, timeout=500, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    texts = []
    for cell in nb.cells:
        if cell.cell_type == "code":
            texts.append("".join(each.get("text") or str(each.get("data")) for each in cell.outputs))
    print(json.dumps(texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
