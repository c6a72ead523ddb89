"""What a fork changes leaves `make test` green: the tests that read the tree, in a copy with such
changes."""

import re
import sys

import pytest

from support.trees import apply_readme, call, copy_tree

# a model that does not divide evenly, no launch line, no out_dir; an overlay
SIZE = "n_layer = 3\nn_head = 2\nn_embd = 6\n"
CONFIGS = {
    "mine.py": SIZE + "batch_size = 7\nwarmup_iters = 9\nmax_iters = 5\n",
    "dnt/mine.py": "learning_rate = 0.5\n",
    "ours/big.py": "n_layer = 3\nn_embd = 66\nn_head = 3\n",
}
SCRATCH = "import pandas\nimport train\n\n\ndef f():\n" + "    raise ValueError\n" * 99
PREPARE = '''"""Mine."""

from nanodnt.prepare import script


@script.command
def main(argv=None):
    pass
'''
# of the fast suite, what reads the tree: sources, flags, configs, pages, optimizers and layouts by
# their names
READERS = "docs tools/test_bench.py tools/test_describe.py tools/test_nanogpt.py unit/test_house.py"
READERS += " unit/test_configs.py unit/test_configurator.py unit/test_paper_values.py"
READERS += " unit/test_optim.py unit/test_optim_groups.py unit/test_layout_equations.py"
READERS += " unit/test_schedules.py unit/test_adapter.py"


def write(root, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def change(root) -> None:
    """README's "Change it", whole; new files of every kind; a new flag without a comment; other
    pages; a config and pages deleted."""
    apply_readme(root)
    for name, text in CONFIGS.items():
        write(root, f"config/{name}", text)
    for name in ("my_claims.py", "scratch.py", "exported/quickstart/model.py", "notebooks/look.py"):
        write(root, name, SCRATCH)
    write(root, "notebooks/look.ipynb", "{}")
    write(root, "data/mine/prepare.py", PREPARE)
    lion = (root / "nanodnt/optim/lion.py").read_text()
    write(root, "nanodnt/optim/mine.py", lion.replace('"lion"', '"lynx"'))
    settings = (root / "nanodnt/settings.py").read_text()
    assert settings.count("    schedule: ") == 1
    write(
        root,
        "nanodnt/settings.py",
        settings.replace("    schedule: ", "    my_flag: int = 3\n    schedule: "),
    )
    write(root, "README.md", "# A fork\n")
    write(root, "docs/layouts.md", "# Layouts\n")
    for name in ("CITATION.cff", "docs/moe.md", "docs/from_nanogpt.md", "config/vdnt/large.py"):
        (root / name).unlink(missing_ok=True)


@pytest.mark.deep
def test_a_fork_passes_the_tests(tmp_path):
    root = copy_tree(tmp_path / "tree")
    change(root)
    paths = [f"tests/{name}" for name in READERS.split() if (root / "tests" / name).exists()]
    pytest_there = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", *paths]
    printed = call(root, pytest_there, timeout_s=900)
    assert int(re.search(r"(\d+) passed", printed)[1]) > 500
    for name in ("quiet", "lion", "lynx"):  # the new layout and the new optimizers are tested
        assert re.search(rf"\[.*{name}.*\] PASSED", printed), name
